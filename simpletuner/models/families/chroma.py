"""Chroma: FLUX.1-schnell without modulation layers and CLIP, with masked T5-XXL text and real guidance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from simpletuner.models.families.flux import Flux, pack, position_ids, unpack
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching, round_to_bf16_times_1000
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.context.context_parallel import TOKENS, TokenSplit
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Chroma(ModelFamily):
    pipelines = ("ChromaPipeline",)
    float32_inputs = ("timestep", "txt_ids", "img_ids")
    # ChromaTransformer2DModel.forward: `timestep.to(hidden_states.dtype) * 1000`.
    round_sigmas_in_bf16 = staticmethod(round_to_bf16_times_1000)
    objective = flow_matching
    packing = 4
    # As Flux, but its class has no plan. The mask stays whole: blocks make one of it for each pair of tokens.
    fuses_qkv = True
    sequence_plan = replace(
        Flux.sequence_plan,
        splits={
            "": {
                "hidden_states": TOKENS,
                "encoder_hidden_states": TOKENS,
                "img_ids": TokenSplit(split_dim=0, expected_dims=2),
                "txt_ids": TokenSplit(split_dim=0, expected_dims=2),
            }
        },
    )

    def default_max_length(self) -> int:
        return 512

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().conditioning_shapes()
        return {**shapes, "prompt_attention_mask": shapes["prompt_embeds"][:1]}

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, max_length, D), mask (B, max_length), with one token of padding."""
        embeds, _, mask, *_ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        height, width = noised_BCHW.shape[-2:]
        dtype, device = noised_BCHW.dtype, noised_BCHW.device
        tokens, embeds = pack(noised_BCHW), conditioning["prompt_embeds"].to(dtype)
        # The mask covers text and image. It is floating-point, so attention adds its ones to the scores, as
        # it does in the pipeline. To leave padding out altogether, as Chroma was trained, it would have to be
        # boolean, which diffusers does not pass (https://github.com/huggingface/diffusers/issues/13619).
        text_mask = conditioning["prompt_attention_mask"].to(dtype)
        mask = torch.cat([text_mask, text_mask.new_ones(tokens.shape[:2])], dim=1)
        keep_mask_in_checkpointing(model, mask)
        prediction = model(
            hidden_states=tokens,
            timestep=timesteps_B,
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=device, dtype=dtype),
            img_ids=position_ids(height, width, device).to(dtype),
            attention_mask=mask,
            return_dict=False,
        )[0]
        return unpack(prediction, Shape(1, height, width))

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return unpack(latents, shape)


def keep_mask_in_checkpointing(model: nn.Module, mask: Tensor) -> None:
    """Pass the mask to the single-stream blocks, too: with gradient checkpointing diffusers leaves it out."""
    denoiser: Any = getattr(model, "module", model)  # the module inside DistributedDataParallel

    if denoiser.gradient_checkpointing:
        run = denoiser._gradient_checkpointing_func
        if isinstance(run, partial) and run.func is run_with_mask:
            run = run.args[0]  # an earlier call's mask is another one
        denoiser.enable_gradient_checkpointing(partial(run_with_mask, run, mask))


def run_with_mask(run: Callable[..., object], mask: Tensor, block: nn.Module, *args: object) -> object:
    names = [*signature(type(block).forward).parameters][1:]
    return run(block, *args, mask) if names.index("attention_mask") == len(args) else run(block, *args)
