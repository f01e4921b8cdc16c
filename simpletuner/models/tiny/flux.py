"""A tiny FLUX.1-dev: a transformer of about 1 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from simpletuner.models.tiny.encoders import build_clip, build_t5, load_vae
from simpletuner.models.tiny.tokenizers import build_clip_tokenizer, build_t5_tokenizer

TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * 4,  # the VAE's 4 channels, 2 x 2 cells to a token
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "axes_dims_rope": [4, 10, 10],
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "guidance_embeds": True,
}

SCHEDULER: dict[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
}


def build() -> FluxPipeline:
    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    return FluxPipeline(
        vae=load_vae(),
        text_encoder=build_clip(clip_tokenizer, width=32),
        text_encoder_2=build_t5(t5_tokenizer, width=64),
        tokenizer=clip_tokenizer,
        tokenizer_2=t5_tokenizer,
        transformer=FluxTransformer2DModel(**TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
    )
