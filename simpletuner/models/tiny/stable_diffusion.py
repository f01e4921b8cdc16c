"""Tiny Stable Diffusion 1.x and 2.x: U-Nets of about 1 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel

from simpletuner.models.tiny.encoders import build_clip, load_vae
from simpletuner.models.tiny.tokenizers import build_clip_tokenizer

UNET_1: dict[str, Any] = {
    "sample_size": 16,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "block_out_channels": [32, 64, 64],
    "norm_num_groups": 16,
    "layers_per_block": 1,
    "attention_head_dim": 4,  # the number of heads, not their width, as in the published configs
}

UNET_2: dict[str, Any] = UNET_1 | {"attention_head_dim": [2, 4, 4], "use_linear_projection": True}

SCHEDULER: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "timestep_spacing": "leading",
    "steps_offset": 1,
}


def build_sd1() -> StableDiffusionPipeline:
    return build(width=32, unet=UNET_1, prediction="epsilon")


def build_sd2() -> StableDiffusionPipeline:
    return build(width=64, unet=UNET_2, prediction="v_prediction")


def build(width: int, unet: dict[str, Any], prediction: str) -> StableDiffusionPipeline:
    tokenizer = build_clip_tokenizer()
    return StableDiffusionPipeline(
        vae=load_vae(),
        text_encoder=build_clip(tokenizer, width),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(**unet, cross_attention_dim=width),
        scheduler=EulerDiscreteScheduler(**SCHEDULER, prediction_type=prediction),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
