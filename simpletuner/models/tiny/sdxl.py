"""A tiny SDXL: a U-Net of about 2 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

from simpletuner.models.tiny.encoders import build_clip, load_vae
from simpletuner.models.tiny.tokenizers import build_clip_tokenizer

UNET: dict[str, Any] = {
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

SCHEDULER: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    # SDXL predicts epsilon, which leaves a tint and noise in images after a run of minutes.
    "prediction_type": "v_prediction",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}


def build(**unet: Any) -> StableDiffusionXLPipeline:
    """Build the pipeline; `unet` replaces entries of UNET, for tests and benchmarks."""
    tokenizer = build_clip_tokenizer()
    return StableDiffusionXLPipeline(
        vae=load_vae(),
        text_encoder=build_clip(tokenizer, width=32),
        text_encoder_2=build_clip(tokenizer, width=64, projection=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel(**UNET | unet),
        scheduler=EulerDiscreteScheduler(**SCHEDULER),
    )
