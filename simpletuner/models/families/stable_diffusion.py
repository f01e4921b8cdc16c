"""Stable Diffusion 1.x and 2.x: a U-Net with one CLIP text encoder, CLIP-L or OpenCLIP-H.

They differ in widths alone; whether a checkpoint predicts epsilon or v is in its scheduler's config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import diffusion
from simpletuner.models.family.text_encoding import Conditioning

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class SD1(ModelFamily):
    pipelines = ("StableDiffusionPipeline",)
    denoiser_name = "unet"
    fuses_qkv = True
    objective = diffusion
    text_width = "cross_attention_dim"

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        embeds, _ = pipeline.encode_prompt(captions, pipeline.device, 1, do_classifier_free_guidance=False)
        return {"prompt_embeds": embeds}

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        embeds = conditioning["prompt_embeds"].to(noised_BCHW.dtype)
        return model(noised_BCHW, timesteps_B, encoder_hidden_states=embeds, return_dict=False)[0]


class SD2(SD1):
    """Stable Diffusion 2.x."""
