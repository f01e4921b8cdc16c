"""Stable Diffusion XL: a U-Net with two CLIP encoders, told each picture's original size and crop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.geometry import Geometry
from simpletuner.models.family import Conditioning, Family, Traits
from simpletuner.models.objectives import diffusion
from simpletuner.models.tiny import build_clip, build_clip_tokenizer, load_vae


def encode(_: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, 77, D) and the pooled ones (B, P)."""
    embeds, _, pooled, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def unconditional(family: Family, empty: Conditioning) -> Conditioning:
    """Return zeros where the pipeline was published so (SDXL base), else the empty caption."""
    if not family.index.get("force_zeros_for_empty_prompt", True):
        return empty
    return {name: torch.zeros_like(value) for name, value in empty.items()}


def time_ids(_: Family, geometry: Geometry) -> Conditioning:
    """Return original height and width, crop top and left, target height and width; float32, since bf16 would round
    every number above 256 (Podell et al. 2023, arXiv:2307.01952, section 2.2)."""
    pairs = (geometry.original, geometry.crop_left_top, geometry.target)
    return {"time_ids": torch.tensor([float(value) for pair in pairs for value in reversed(pair)])}


def predict(_: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
    """Call the U-Net as StableDiffusionXLPipeline does."""
    dtype = noisy_BCHW.dtype
    told = {"text_embeds": conditioning["pooled_prompt_embeds"].to(dtype), "time_ids": conditioning["time_ids"]}
    return model(
        noisy_BCHW,
        timesteps_B,
        encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
        added_cond_kwargs=told,
        return_dict=False,
    )[0]


def build_tiny() -> Any:
    """Return a pipeline with a U-Net of about 2 million parameters."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    tokenizer = build_clip_tokenizer()
    return StableDiffusionXLPipeline(
        vae=load_vae(),
        text_encoder=build_clip(tokenizer, width=32),
        text_encoder_2=build_clip(tokenizer, width=64, projection=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel(**TINY_UNET),
        scheduler=EulerDiscreteScheduler(**TINY_SCHEDULER),
    )


TINY_UNET: dict[str, Any] = {
    "sample_size": 16,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [32, 64, 64],
    "norm_num_groups": 16,
    "layers_per_block": 1,
    "transformer_layers_per_block": [1, 1, 2],
    "attention_head_dim": [2, 4, 4],
    "use_linear_projection": True,
    "cross_attention_dim": 32 + 64,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 64 + 6 * 32,
}

TINY_SCHEDULER: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",  # SDXL says epsilon, which leaves a tint and noise after a run of minutes
    "timestep_spacing": "leading",
    "steps_offset": 1,
}

SDXL = Traits(
    pipelines=("StableDiffusionXLPipeline",),
    denoiser_name="unet",
    build_tiny=build_tiny,
    objective=diffusion,
    encode=encode,
    predict=predict,
    unconditional=unconditional,
    picture_conditioning=time_ids,
)
