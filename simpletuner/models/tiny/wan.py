"""A tiny Wan: a transformer of about 0.6 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

from simpletuner.models.tiny.encoders import build_umt5
from simpletuner.models.tiny.tokenizers import build_t5_tokenizer

VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 2, 2],
    "num_res_blocks": 1,
    "latents_mean": [0.27, 0.28, -0.35, 0.23],
    "latents_std": [0.12, 0.09, 0.11, 0.1],
}

TRANSFORMER: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "text_dim": 64,
    "freq_dim": 64,
    "ffn_dim": 256,
    "num_layers": 2,
}

SCHEDULER: dict[str, Any] = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}


def build() -> WanPipeline:
    tokenizer = build_t5_tokenizer()
    return WanPipeline(
        vae=AutoencoderKLWan(**VAE),
        text_encoder=build_umt5(tokenizer, width=64),
        tokenizer=tokenizer,
        transformer=WanTransformer3DModel(**TRANSFORMER),
        scheduler=UniPCMultistepScheduler(**SCHEDULER),
    )
