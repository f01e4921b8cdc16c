"""Qwen-Image: a flow-matching transformer over 2x2 latent patches, with the text part of Qwen2.5-VL.

Its VAE is one for video, its texts are as long as the caption, and its guidance needs a negative prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.families.flux import pack, unpack
from simpletuner.models.family.base import ModelFamily, SamplingParams
from simpletuner.models.family.objectives import flow_matching, round_to_bf16
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.context.context_parallel import SequencePlan
from simpletuner.settings.values.shape import Shape


class QwenImage(ModelFamily):
    """Qwen-Image."""

    pipelines = ("QwenImagePipeline",)
    float32_inputs = ("timestep", "guidance")
    # QwenImageTransformer2DModel.forward casts the timestep to bf16; its embedding scales it by 1000 in float32.
    round_sigmas_in_bf16 = staticmethod(round_to_bf16)
    objective = flow_matching
    packing = 4
    host_inputs = ("prompt_embeds_mask",)
    sequence_plan = SequencePlan(
        attention={
            "transformer_blocks.*.attn": (
                "transformer_blocks.0.encoder_hidden_states",
                "transformer_blocks.0.hidden_states",
            )
        },
        gathered={"proj_out": "transformer_blocks.0.hidden_states"},
    )

    def default_max_length(self) -> int:
        return 512

    def encode_prompts(self, pipeline: Any, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, L, D), zero after each caption's end, and their mask (B, L)."""
        embeds, mask = pipeline.encode_prompt(captions, max_sequence_length=self.max_length)
        if mask is None:  # all captions are equally long
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as QwenImagePipeline does: with a mask only where one text is shorter than another."""
        batch, _, height, width = noised_BCHW.shape
        mask = conditioning["prompt_embeds_mask"]
        lengths: list[int] = mask.sum(1).tolist()  # they become shapes
        longest = max(lengths)
        tokens = model(
            hidden_states=pack(noised_BCHW),
            timestep=timesteps_B,
            encoder_hidden_states_mask=(
                mask[:, :longest].to(noised_BCHW.device, non_blocking=True) if min(lengths) < longest else None
            ),
            encoder_hidden_states=conditioning["prompt_embeds"][:, :longest].to(noised_BCHW.dtype),
            img_shapes=[[(1, height // 2, width // 2)]] * batch,
            return_dict=False,
        )[0]
        return unpack(tokens, Shape(1, height, width))

    def unused_parameters(self) -> tuple[str, ...]:
        # They compute the text that leaves the last block, and only its image tokens are read.
        last = f"transformer_blocks.{self.config['num_layers'] - 1}"
        return (f"{last}.attn.add_q_proj", f"{last}.attn.norm_added_q", f"{last}.attn.to_add_out", f"{last}.txt_mlp")

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, Any]:
        kwargs = super().pipeline_kwargs(positive, negative if sampling.guidance > 1 else {}, sampling)
        return kwargs | {
            # The pipeline's guidance_scale is for guidance-distilled models, of which none is published.
            "guidance_scale": None,
            "true_cfg_scale": sampling.guidance,
            # The most it takes. Its default of 512 would cut embeddings of a longer tokenizer_max_length.
            "max_sequence_length": 1024,
        }

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return unpack(latents, shape)
