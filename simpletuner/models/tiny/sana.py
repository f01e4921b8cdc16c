"""A tiny Sana 1.5: a transformer of about 0.5 million parameters, and latents 8 px wide."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

from simpletuner.models.tiny.encoders import build_gemma
from simpletuner.models.tiny.tokenizers import build_gemma_tokenizer

VAE: dict[str, Any] = {
    "latent_channels": 8,
    "attention_head_dim": 8,
    "encoder_block_types": ["ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"],
    "decoder_block_types": ["ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"],
    "encoder_block_out_channels": [8, 16, 32, 32],
    "decoder_block_out_channels": [8, 16, 32, 32],
    "encoder_layers_per_block": [1, 1, 1, 1],
    "decoder_layers_per_block": [1, 1, 1, 1],
    "encoder_qkv_multiscales": [[], [], [], [5]],
    "decoder_qkv_multiscales": [[], [], [], [5]],
    "scaling_factor": 0.44,
}

TRANSFORMER: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 6,
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 24,
    "cross_attention_dim": 6 * 16,
    "caption_channels": 32,
    "sample_size": 8,
    "qk_norm": "rms_norm_across_heads",
}


def build() -> SanaPipeline:
    tokenizer = build_gemma_tokenizer()
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_gemma(tokenizer, width=32),
        vae=AutoencoderDC(**VAE),
        transformer=SanaTransformer2DModel(**TRANSFORMER),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )
