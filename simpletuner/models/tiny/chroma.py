"""A tiny Chroma: a transformer of about 0.7 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from simpletuner.models.tiny.encoders import build_t5, load_vae
from simpletuner.models.tiny.tokenizers import build_t5_tokenizer

TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * 4,  # the VAE's 4 channels, 2 x 2 cells to a token
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "axes_dims_rope": [4, 10, 10],
    "joint_attention_dim": 64,
    "approximator_hidden_dim": 64,
    "approximator_layers": 2,
}


def build() -> ChromaPipeline:
    tokenizer = build_t5_tokenizer()
    return ChromaPipeline(
        vae=load_vae(),
        text_encoder=build_t5(tokenizer, width=64),
        tokenizer=tokenizer,
        transformer=ChromaTransformer2DModel(**TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
