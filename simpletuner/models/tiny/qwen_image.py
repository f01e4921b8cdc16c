"""A tiny Qwen-Image: a transformer of about 1 million parameters; its VAE is random."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from simpletuner.models.tiny.encoders import QWEN_WIDTH, build_qwen25_vl
from simpletuner.models.tiny.tokenizers import build_qwen_tokenizer

VAE: dict[str, Any] = {
    "base_dim": 16,
    "z_dim": 4,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "latents_mean": [-0.2, 0.05, -0.24, -0.07],  # measured over the shapes of examples/shapes
    "latents_std": [0.07, 0.05, 0.05, 0.05],
}

TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * 4,  # the VAE's 4 channels, 2 x 2 cells to a token
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "axes_dims_rope": [4, 10, 10],
    "joint_attention_dim": QWEN_WIDTH,
}

SCHEDULER: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
}


def build() -> QwenImagePipeline:
    tokenizer = build_qwen_tokenizer()
    return QwenImagePipeline(
        vae=AutoencoderKLQwenImage(**VAE),
        text_encoder=build_qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(**TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
    )
