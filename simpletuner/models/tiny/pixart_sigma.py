"""A tiny PixArt Sigma: a transformer of about 0.7 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

from simpletuner.models.tiny.encoders import build_t5, load_vae
from simpletuner.models.tiny.tokenizers import build_t5_tokenizer

TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "num_layers": 4,
    "cross_attention_dim": 4 * 24,
    "sample_size": 16,
    "caption_channels": 64,
    "use_additional_conditions": False,
}


def build() -> PixArtSigmaPipeline:
    tokenizer = build_t5_tokenizer()
    return PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_t5(tokenizer, width=64),
        vae=load_vae(),
        transformer=PixArtTransformer2DModel(**TRANSFORMER),
        scheduler=DPMSolverMultistepScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02),
    )
