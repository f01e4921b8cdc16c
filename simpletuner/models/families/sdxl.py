"""Stable Diffusion XL: a U-Net with two CLIP text encoders, conditioned on original size and crop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletuner.data.images.geometry import Geometry
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import diffusion
from simpletuner.models.family.text_encoding import Conditioning

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class SDXL(ModelFamily):
    """Stable Diffusion XL."""

    pipelines = ("StableDiffusionXLPipeline",)
    denoiser_name = "unet"
    fuses_qkv = True
    float32_inputs = ("timestep", "time_ids")
    objective = diffusion
    text_width = "cross_attention_dim"

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        config, numbers = self.exported_config(), 6
        pooled = config["projection_class_embeddings_input_dim"] - numbers * config["addition_time_embed_dim"]
        return {**super().conditioning_shapes(), "pooled_prompt_embeds": (pooled,), "time_ids": (numbers,)}

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, 77, D) and pooled_prompt_embeds (B, P)."""
        embeds, _, pooled, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the U-Net as StableDiffusionXLPipeline does."""
        dtype = noised_BCHW.dtype
        return model(
            noised_BCHW,
            timesteps_B,
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            added_cond_kwargs={
                "text_embeds": conditioning["pooled_prompt_embeds"].to(dtype),
                "time_ids": conditioning["time_ids"],
            },
            return_dict=False,
        )[0]

    def unconditional(self, empty: Conditioning) -> Conditioning:
        # SDXL base is published with force_zeros_for_empty_prompt: its pipeline takes zeros for `no prompt`.
        if not self.index.get("force_zeros_for_empty_prompt", True):
            return empty
        return {name: torch.zeros_like(value) for name, value in empty.items()}

    def size_conditioning(self, geometry: Geometry) -> Conditioning:
        """Original height and width, crop top and left, target height and width, as time_ids (6).

        Float32, since bf16 would round every number above 256 (Podell et al. 2023, arXiv:2307.01952, section
        2.2).
        """
        pairs = (geometry.original.size, geometry.crop_left_top, geometry.target.size)
        return {"time_ids": torch.tensor([float(value) for pair in pairs for value in reversed(pair)])}
