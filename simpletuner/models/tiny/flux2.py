"""A tiny FLUX.2 klein: a transformer of about 0.9 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from simpletuner.models.tiny.encoders import load_vae, spread_embeddings
from simpletuner.models.tiny.tokenizers import build_qwen_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 28,  # the pipeline reads layers 9, 18 and 27
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * 4,  # 2x2 patches of the VAE's 4 channels
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "axes_dims_rope": [4, 8, 8, 4],
    "joint_attention_dim": 3 * 32,
    "timestep_guidance_channels": 64,
    "guidance_embeds": False,
}


def build() -> Flux2KleinPipeline:
    tokenizer = build_qwen_tokenizer()
    return Flux2KleinPipeline(
        vae=build_vae(),
        text_encoder=spread_embeddings(Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **TEXT))),
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(**TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )


def build_vae() -> AutoencoderKLFlux2:
    """The package's VAE as one of FLUX.2, with statistics of 2x2 patches instead of a scaling factor."""
    trained = load_vae()
    known = AutoencoderKLFlux2.extract_init_dict(dict(trained.config))[0]
    vae = AutoencoderKLFlux2(**known)
    vae.bn.running_mean.normal_(std=0.1)
    vae.bn.running_var.fill_(trained.config.scaling_factor**-2)
    vae.load_state_dict(trained.state_dict() | vae.bn.state_dict(prefix="bn."))
    return vae
