"""FLUX.2: a flow-matching transformer over patches that its VAE normalises, with hidden states of a language model.

klein reads Qwen3 and draws with real guidance; dev reads Mistral 3 and embeds the guidance scale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.geometry import Size
from simpletuner.models.families.flux import embedded_guidance
from simpletuner.models.family import Conditioning, Family, SamplingParams, Traits, without_negative
from simpletuner.models.objectives import flow_matching, rounded_times_1000
from simpletuner.models.tiny import load_vae
from simpletuner.models.tiny_qwen import build_qwen_tokenizer, with_clear_words


def positions(batch: int, rows: int, columns: int, words: int, device: torch.device) -> Tensor:
    """Return (0, row, column, word) of each token, shape (batch, rows * columns * words, 4)."""
    axes = [torch.arange(length, device=device) for length in (1, rows, columns, words)]
    return torch.cartesian_prod(*axes).expand(batch, -1, -1)


def from_tokens(latents: Tensor, size: Size) -> Tensor:
    """Return tokens (B, L, C), row by row, as latents BCHW; latents BCHW as they are."""
    return latents.transpose(1, 2).unflatten(2, size) if latents.ndim == 3 else latents


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, max_length, 3 D): three layers' hidden states side by side, padding included."""
    embeds, _ = pipeline.encode_prompt(captions, max_sequence_length=family.max_length)
    return {"prompt_embeds": embeds}


def predict(
    family: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call the transformer as Flux2KleinPipeline and Flux2Pipeline do."""
    batch, _, height, width = noisy_BCHW.shape
    embeds = conditioning["prompt_embeds"].to(noisy_BCHW.dtype)
    # dev was published before its config could say that guidance is embedded
    guided = family.config.get("guidance_embeds", True)
    tokens = model(
        hidden_states=noisy_BCHW.flatten(2).transpose(1, 2),
        timestep=timesteps_B,
        guidance=embedded_guidance(family, noisy_BCHW) if guided else None,
        encoder_hidden_states=embeds,
        txt_ids=positions(batch, 1, 1, embeds.shape[1], noisy_BCHW.device),
        img_ids=positions(batch, height, width, 1, noisy_BCHW.device),
        return_dict=False,
    )[0]
    return from_tokens(tokens, (height, width))


def draw_arguments(positive: Conditioning, negative: Conditioning, sampling: SamplingParams) -> dict[str, Any]:
    """Return what klein's pipeline is told: of negative prompts it takes embeddings alone."""
    embedded = {f"negative_{name}": value for name, value in negative.items()}
    return {**positive, **embedded, **sampling.arguments()}


def build_tiny() -> Any:
    """Return a klein pipeline with a transformer of about 0.9 million parameters."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_qwen_tokenizer()
    return Flux2KleinPipeline(
        vae=build_vae(),
        text_encoder=with_clear_words(Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **TINY_TEXT))),
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(**TINY_TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )


def build_vae() -> Any:
    """Return the package's VAE as one of FLUX.2, with statistics of 2x2 patches instead of a scaling factor."""
    from diffusers import AutoencoderKLFlux2

    trained = load_vae()
    known = AutoencoderKLFlux2.extract_init_dict(dict(trained.config))[0]
    vae = AutoencoderKLFlux2(**known)
    vae.bn.running_mean.normal_(std=0.1)
    vae.bn.running_var.fill_(trained.config.scaling_factor**-2)
    vae.load_state_dict(trained.state_dict() | vae.bn.state_dict(prefix="bn."))
    return vae


TINY_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 28,  # the pipeline reads layers 9, 18 and 27
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}

TINY_TRANSFORMER: dict[str, Any] = {
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

DEV = Traits(
    pipelines=("Flux2Pipeline",),
    objective=flow_matching,
    level_in_bf16=rounded_times_1000,
    encode=encode,
    predict=predict,
    max_length=lambda _: 512,
    draw_arguments=without_negative,
    drawn_latents=from_tokens,
)

FLUX2 = replace(
    DEV,
    pipelines=("Flux2KleinPipeline",),
    build_tiny=build_tiny,
    draw_arguments=draw_arguments,
    draws_for_vae=True,
    siblings=(DEV,),
)
