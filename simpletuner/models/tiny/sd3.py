"""A tiny Stable Diffusion 3.5 medium: a transformer of about 0.4 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from simpletuner.models.tiny.encoders import build_clip, build_t5, load_vae
from simpletuner.models.tiny.tokenizers import build_clip_tokenizer, build_t5_tokenizer

TRANSFORMER: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 16 + 32,
    "pos_embed_max_size": 64,
    "dual_attention_layers": [0],
    "qk_norm": "rms_norm",
}


def build() -> StableDiffusion3Pipeline:
    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    return StableDiffusion3Pipeline(
        vae=load_vae(),
        text_encoder=build_clip(clip_tokenizer, width=16, projection=True),
        text_encoder_2=build_clip(clip_tokenizer, width=32, projection=True),
        text_encoder_3=build_t5(t5_tokenizer, width=64),
        tokenizer=clip_tokenizer,
        tokenizer_2=clip_tokenizer,
        tokenizer_3=t5_tokenizer,
        transformer=SD3Transformer2DModel(**TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
