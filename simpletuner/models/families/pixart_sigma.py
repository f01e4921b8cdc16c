"""PixArt: a diffusion transformer that reads T5-XXL by cross-attention and also answers its variance, which is dropped.

Sigma reads 300 tokens. Alpha reads 120, and its 1024 px checkpoints are told each picture's size and aspect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.geometry import Geometry
from simpletuner.models.family import Conditioning, Family, SamplingParams, Traits, with_guidance
from simpletuner.models.objectives import diffusion
from simpletuner.models.text_encoding import encoded_with_mask
from simpletuner.models.tiny import build_t5, build_t5_tokenizer, load_vae

ALPHA = "PixArtAlphaPipeline"
SIZE_TOLD_AT = 128
"""The sample_size of checkpoints that are told sizes, where their config leaves that open."""


def told_sizes(family: Family) -> bool:
    """Return whether the denoiser embeds sizes, as PixArtTransformer2DModel decides it."""
    stated = family.config.get("use_additional_conditions")
    return family.config.get("sample_size") == SIZE_TOLD_AT if stated is None else stated


def sizes(family: Family, geometry: Geometry) -> Conditioning:
    """Return original height and width in px, and height / width of the crop; float32, since bf16 rounds above 256
    (Chen et al. 2023, arXiv:2310.00426, and how its training code fills them)."""
    if not told_sizes(family):
        return {}
    (width, height), target = geometry.original, geometry.target
    return {
        "resolution": torch.tensor([float(height), float(width)]),
        "aspect_ratio": torch.tensor([target[1] / target[0]]),
    }


def predict(_: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
    """Call the transformer as PixArtSigmaPipeline does, and return the noise without the variance."""
    noise_and_variance = model(
        noisy_BCHW,
        encoder_hidden_states=conditioning["prompt_embeds"].to(noisy_BCHW.dtype),
        encoder_attention_mask=conditioning["prompt_attention_mask"],
        timestep=timesteps_B,
        added_cond_kwargs={name: conditioning.get(name) for name in ("resolution", "aspect_ratio")},
        return_dict=False,
    )[0]
    return noise_and_variance[:, : noisy_BCHW.shape[1]]


def draw_arguments(positive: Conditioning, negative: Conditioning, sampling: SamplingParams) -> dict[str, Any]:
    """Return what is told to a pipeline that would choose another size itself and cleans captions if it can."""
    return with_guidance(positive, negative, sampling) | {"use_resolution_binning": False, "clean_caption": False}


def build_tiny() -> Any:
    """Return a PixArt Sigma pipeline with a transformer of about 700 thousand parameters."""
    from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

    tokenizer = build_t5_tokenizer()
    return PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_t5(tokenizer, width=64),
        vae=load_vae(),
        transformer=PixArtTransformer2DModel(**TINY_TRANSFORMER),
        scheduler=DPMSolverMultistepScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02),
    )


TINY_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "num_layers": 4,
    "cross_attention_dim": 4 * 24,
    "sample_size": 16,
    "caption_channels": 64,
    "use_additional_conditions": False,
}

PIXART_SIGMA = Traits(
    pipelines=("PixArtSigmaPipeline", ALPHA),
    build_tiny=build_tiny,
    objective=diffusion,
    encode=encoded_with_mask,
    predict=predict,
    max_length=lambda family: 120 if family.index.get("_class_name") == ALPHA else 300,
    picture_conditioning=sizes,
    draw_arguments=draw_arguments,
)
