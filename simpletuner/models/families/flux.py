"""Flux.1: a flow-matching transformer over 2x2 latent patches, with CLIP-L pooled and T5-XXL text.

Dev and the checkpoints trained from it embed the guidance scale; schnell does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletuner.data.prefetch import references_in
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching, round_to_bf16_times_1000
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.context.context_parallel import SequencePlan
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Flux(ModelFamily):
    pipelines = ("FluxPipeline",)
    float32_inputs = ("timestep", "guidance", "txt_ids", "img_ids")
    # FluxTransformer2DModel.forward: `timestep.to(hidden_states.dtype) * 1000`.
    round_sigmas_in_bf16 = staticmethod(round_to_bf16_times_1000)
    objective = flow_matching
    packing = 4
    fuses_qkv = True
    sequence_plan = SequencePlan(
        attention={
            "transformer_blocks.*.attn": ("encoder_hidden_states", "hidden_states"),
            "single_transformer_blocks.*.attn": ("encoder_hidden_states", "hidden_states"),
        },
        gathered={"proj_out": "hidden_states"},
    )

    @classmethod
    def variants(cls) -> tuple[type[ModelFamily], ...]:
        return (FluxKontext,)

    def default_max_length(self) -> int:
        return 512 if self.config.get("guidance_embeds") else 256  # schnell was distilled on prompts of 256 tokens

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            **super().conditioning_shapes(),
            "pooled_prompt_embeds": (self.exported_config()["pooled_projection_dim"],),
        }

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, max_length, D) and pooled_prompt_embeds (B, P)."""
        embeds, pooled, _ = pipeline.encode_prompt(captions, None, max_sequence_length=self.max_length)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        height, width = noised_BCHW.shape[-2:]
        tokens, ids = self.image_inputs(noised_BCHW, conditioning)
        dtype, device = noised_BCHW.dtype, noised_BCHW.device
        embeds = conditioning["prompt_embeds"].to(dtype)
        predicted = model(
            hidden_states=tokens,
            timestep=timesteps_B,
            guidance=guidance_scale(self, noised_BCHW) if self.config.get("guidance_embeds") else None,
            pooled_projections=conditioning["pooled_prompt_embeds"].to(dtype),
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=device, dtype=dtype),
            img_ids=ids.to(dtype),
            return_dict=False,
        )[0]
        return unpack(predicted[:, : height // 2 * (width // 2)], Shape(1, height, width))

    def image_inputs(self, noised_BCHW: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
        """Return the tokens (B, L, D) of images and their positions (L, 3): of the latents alone."""
        return pack(noised_BCHW), position_ids(*noised_BCHW.shape[-2:], noised_BCHW.device)

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        # Guidance is an input of the transformer, so the pipeline runs without a negative prompt.
        return {**positive, **sampling.kwargs()}

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return unpack(latents, shape)


class FluxKontext(Flux):
    """FLUX.1 Kontext edits images: their tokens follow the result's, at positions of their own."""

    pipelines = ("FluxKontextPipeline",)
    most_references = 1
    tiny_pipeline = ""

    def image_inputs(self, noised_BCHW: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
        tokens, ids = super().image_inputs(noised_BCHW, conditioning)
        for reference in references_in(conditioning):
            own = position_ids(*reference.shape[-2:], noised_BCHW.device)
            own[:, 0] = 1
            tokens = torch.cat([tokens, pack(reference.to(noised_BCHW.dtype))], dim=1)
            ids = torch.cat([ids, own])
        return tokens, ids

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        # Otherwise it resizes references to sizes of its own, and results to the area of 1024 x 1024 px.
        sizes = {"max_area": sampling.shape.area, "_auto_resize": False}
        return super().pipeline_kwargs(positive, negative, sampling) | sizes


def guidance_scale(family: ModelFamily, noised_BCHW: Tensor) -> Tensor:
    """The guidance scale (B) that a guidance-distilled transformer is trained with."""
    return torch.full((len(noised_BCHW),), family.settings.objective.flux_guidance_value, device=noised_BCHW.device)


def pack(latents_BCHW: Tensor) -> Tensor:
    """Convert 2x2 patches to tokens (B, H/2 * W/2, 4C), channels outermost within a token."""
    b, c, h, w = latents_BCHW.shape
    patches = latents_BCHW.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, (h // 2) * (w // 2), c * 4)


def unpack(tokens_BLD: Tensor, shape: Shape) -> Tensor:
    """Convert tokens to latents (B, C, height, width), inverse of `pack`; drops an odd last row or column."""
    b, _, d = tokens_BLD.shape
    rows, columns = shape.height // 2, shape.width // 2
    patches = tokens_BLD.view(b, rows, columns, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, d // 4, 2 * rows, 2 * columns)


def position_ids(height: int, width: int, device: torch.device) -> Tensor:
    """(0, row, column) of each patch, shape (height/2 * width/2, 3)."""
    # Made on the device: a copy of pageable memory would wait for all that is queued there.
    sides = (torch.arange(side // 2, device=device) for side in (height, width))
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()
