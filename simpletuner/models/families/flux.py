"""Flux.1: a flow-matching transformer over 2x2 latent patches, with CLIP-L pooled and T5-XXL text.

Dev and its kin embed the guidance scale; schnell, distilled on prompts of 256 tokens, does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.geometry import Size
from simpletuner.models.family import Conditioning, Family, Traits, without_negative
from simpletuner.models.objectives import flow_matching, rounded_times_1000
from simpletuner.models.tiny import build_clip, build_clip_tokenizer, build_t5, build_t5_tokenizer, load_vae


def packed(latents_BCHW: Tensor) -> Tensor:
    """Return 2x2 patches as tokens (B, H/2 * W/2, 4C), channels outermost within a token."""
    b, c, h, w = latents_BCHW.shape
    patches = latents_BCHW.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, (h // 2) * (w // 2), c * 4)


def unpacked(tokens_BLD: Tensor, size: Size) -> Tensor:
    """Return tokens as latents (B, C, height, width): the inverse of `packed`; an odd row or column is not there."""
    b, _, d = tokens_BLD.shape
    rows, columns = size[0] // 2, size[1] // 2
    patches = tokens_BLD.view(b, rows, columns, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, d // 4, 2 * rows, 2 * columns)


def position_ids(height: int, width: int) -> Tensor:
    """Return (0, row, column) of each patch, shape (height/2 * width/2, 3)."""
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, max_length, D) and the pooled ones (B, P)."""
    embeds, pooled, _ = pipeline.encode_prompt(captions, None, max_sequence_length=family.max_length)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def embedded_guidance(family: Family, noisy_BCHW: Tensor) -> Tensor:
    """Return the scale (B) that a guidance-distilled transformer is told while it trains."""
    return torch.full((len(noisy_BCHW),), family.settings.objective.flux_guidance_value, device=noisy_BCHW.device)


def predict(
    family: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call the transformer as FluxPipeline does."""
    height, width = noisy_BCHW.shape[-2:]
    dtype, device = noisy_BCHW.dtype, noisy_BCHW.device
    embeds = conditioning["prompt_embeds"].to(dtype)
    tokens = model(
        hidden_states=packed(noisy_BCHW),
        timestep=timesteps_B,
        guidance=embedded_guidance(family, noisy_BCHW) if family.config.get("guidance_embeds") else None,
        pooled_projections=conditioning["pooled_prompt_embeds"].to(dtype),
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(embeds.shape[1], 3, device=device, dtype=dtype),
        img_ids=position_ids(height, width).to(device, dtype),
        return_dict=False,
    )[0]
    return unpacked(tokens, (height, width))


def build_tiny() -> Any:
    """Return a FLUX.1-dev pipeline with a transformer of about 1 million parameters."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    return FluxPipeline(
        vae=load_vae(),
        text_encoder=build_clip(clip_tokenizer, width=32),
        text_encoder_2=build_t5(t5_tokenizer, width=64),
        tokenizer=clip_tokenizer,
        tokenizer_2=t5_tokenizer,
        transformer=FluxTransformer2DModel(**TINY_TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(**TINY_SCHEDULER),
    )


TINY_TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * 4,  # the VAE's 4 channels, 2 x 2 cells to a token
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "axes_dims_rope": [4, 10, 10],
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "guidance_embeds": True,
}

TINY_SCHEDULER: dict[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "base_shift": 0.5,
    "max_shift": 1.15,
}

FLUX = Traits(
    pipelines=("FluxPipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    level_in_bf16=rounded_times_1000,
    encode=encode,
    predict=predict,
    max_length=lambda family: 512 if family.config.get("guidance_embeds") else 256,
    draw_arguments=without_negative,
    drawn_latents=unpacked,
)
