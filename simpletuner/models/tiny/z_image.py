"""A tiny Z-Image: a transformer of about 1 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

from simpletuner.models.tiny.encoders import QWEN_WIDTH, build_qwen3, load_vae
from simpletuner.models.tiny.tokenizers import build_qwen_tokenizer

TRANSFORMER: dict[str, Any] = {
    "in_channels": 4,
    "dim": 96,
    "n_layers": 2,
    "n_refiner_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": QWEN_WIDTH,
    "axes_dims": [4, 10, 10],
    "axes_lens": [1536, 512, 512],
}


def build() -> ZImagePipeline:
    tokenizer, transformer = build_qwen_tokenizer(), ZImageTransformer2DModel(**TRANSFORMER)
    for padding in (transformer.x_pad_token, transformer.cap_pad_token):
        padding.data.normal_(std=0.3)  # the norm of zeros has gradients in the hundreds
    return ZImagePipeline(
        vae=load_vae(),
        text_encoder=build_qwen3(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
