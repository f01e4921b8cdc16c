"""A tiny LTX-Video 0.9.5: a transformer of about 0.7 million parameters."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXVideoTransformer3DModel,
)

from simpletuner.models.tiny.encoders import build_t5
from simpletuner.models.tiny.tokenizers import build_t5_tokenizer

VAE: dict[str, Any] = {
    "latent_channels": 8,
    "block_out_channels": [16, 32],
    "down_block_types": ["LTXVideo095DownBlock3D"],
    "layers_per_block": [1, 1],
    "spatio_temporal_scaling": [True],
    "downsample_type": ["spatiotemporal"],
    "decoder_block_out_channels": [16],
    "decoder_layers_per_block": [1, 1],
    "decoder_spatio_temporal_scaling": [True],
    "decoder_inject_noise": [False, False],
    "upsample_residual": [True],
    "upsample_factor": [2],
    "timestep_conditioning": True,
    "patch_size": 4,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 2,
}

TRANSFORMER: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "cross_attention_dim": 128,
    "num_layers": 2,
    "caption_channels": 64,
}


def build() -> LTXConditionPipeline:
    tokenizer = build_t5_tokenizer()
    vae = AutoencoderKLLTXVideo(**VAE)
    channels = VAE["latent_channels"]
    vae.register_buffer("latents_mean", torch.linspace(-0.1, 0.1, channels))
    vae.register_buffer("latents_std", torch.linspace(0.25, 0.35, channels))
    return LTXConditionPipeline(
        vae=vae,
        text_encoder=build_t5(tokenizer, width=64),
        tokenizer=tokenizer,
        transformer=LTXVideoTransformer3DModel(**TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
