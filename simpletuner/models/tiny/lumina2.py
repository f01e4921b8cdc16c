"""A tiny Lumina Image 2.0: a transformer of about 1 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

from simpletuner.models.tiny.encoders import build_gemma
from simpletuner.models.tiny.tokenizers import build_gemma_tokenizer

# Random instead of the package's trained one: the pipeline takes latents to be 8 px wide, whatever its VAE says, and
# those of the trained one are 4 px wide.
VAE: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 16, 16, 16],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "scaling_factor": 4.0,
    "shift_factor": 0.13,
}

TRANSFORMER: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "hidden_size": 96,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 32,
    "axes_dim_rope": [8, 8, 8],
    "cap_feat_dim": 32,
}


def build() -> Lumina2Pipeline:
    tokenizer = build_gemma_tokenizer()
    return Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(**TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=AutoencoderKL(**VAE),
        text_encoder=build_gemma(tokenizer, width=32),
        tokenizer=tokenizer,
    )
