"""Stable Diffusion 1.x and 2.x: a U-Net with one CLIP encoder, CLIP-L or OpenCLIP-H.

They differ in widths alone; whether a checkpoint predicts epsilon or v is in its scheduler's config.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from simpletuner.models.family import Conditioning, Family, Traits
from simpletuner.models.objectives import diffusion
from simpletuner.models.tiny import build_clip, build_clip_tokenizer, load_vae


def encode(_: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, 77, D)."""
    embeds, _ = pipeline.encode_prompt(captions, pipeline.device, 1, do_classifier_free_guidance=False)
    return {"prompt_embeds": embeds}


def predict(_: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
    """Call the U-Net as StableDiffusionPipeline does."""
    embeds = conditioning["prompt_embeds"].to(noisy_BCHW.dtype)
    return model(noisy_BCHW, timesteps_B, encoder_hidden_states=embeds, return_dict=False)[0]


def build_tiny_1() -> Any:
    """Return a 1.x pipeline with a U-Net of about 1 million parameters."""
    return build_tiny(width=32, unet=TINY_UNET, prediction="epsilon")


def build_tiny_2() -> Any:
    """Return a 2.x pipeline with a U-Net of about 1 million parameters."""
    return build_tiny(width=64, unet=TINY_UNET | TINY_UNET_2, prediction="v_prediction")


def build_tiny(width: int, unet: dict[str, Any], prediction: str) -> Any:
    """Return a pipeline with a text encoder of this width."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel

    tokenizer = build_clip_tokenizer()
    return StableDiffusionPipeline(
        vae=load_vae(),
        text_encoder=build_clip(tokenizer, width),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(**unet, cross_attention_dim=width),
        scheduler=EulerDiscreteScheduler(**TINY_SCHEDULER, prediction_type=prediction),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


TINY_UNET: dict[str, Any] = {
    "sample_size": 16,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "block_out_channels": [32, 64, 64],
    "norm_num_groups": 16,
    "layers_per_block": 1,
    "attention_head_dim": 4,  # heads, not their width, as in the published configs
}

TINY_UNET_2: dict[str, Any] = {"attention_head_dim": [2, 4, 4], "use_linear_projection": True}

TINY_SCHEDULER: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "timestep_spacing": "leading",
    "steps_offset": 1,
}

SD1X = Traits(
    pipelines=("StableDiffusionPipeline",),
    denoiser_name="unet",
    build_tiny=build_tiny_1,
    objective=diffusion,
    encode=encode,
    predict=predict,
)

SD2X = Traits(
    pipelines=("StableDiffusionPipeline",),
    denoiser_name="unet",
    build_tiny=build_tiny_2,
    objective=diffusion,
    encode=encode,
    predict=predict,
)
