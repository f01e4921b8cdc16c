"""LTX-Video: a flow-matching transformer over latent cells of a film, with T5-XXL text; a picture is one frame.

0.9.0 is published as an LTXPipeline, 0.9.5 as an LTXConditionPipeline, with longer prompts and a decoder that denoises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.geometry import Size
from simpletuner.models.family import Conditioning, Family, Traits, of_one_frame
from simpletuner.models.objectives import flow_matching
from simpletuner.models.tiny import build_t5, build_t5_tokenizer


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, max_length, D) and prompt_attention_mask (B, max_length)."""
    embeds, mask, _, _ = pipeline.encode_prompt(
        captions, do_classifier_free_guidance=False, max_sequence_length=family.max_length
    )
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask}


def predict(
    family: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call the transformer as LTXConditionPipeline does.

    LTXPipeline names places in other words (rows, columns and a scale), which are the same numbers for one frame.
    """
    batch, _, height, width = noisy_BCHW.shape
    places = places_of_cells(height, width, cell_px(family)).to(noisy_BCHW.device)
    tokens = model(
        hidden_states=noisy_BCHW.flatten(2).transpose(1, 2),
        encoder_hidden_states=conditioning["prompt_embeds"].to(noisy_BCHW.dtype),
        timestep=timesteps_B[:, None] * 1000,
        encoder_attention_mask=conditioning["prompt_attention_mask"],
        video_coords=places.expand(batch, -1, -1),
        return_dict=False,
    )[0]
    return unpacked(tokens, (height, width))


def unpacked(latents: Tensor, size: Size) -> Tensor:
    """Return tokens (B, height * width, C), or a film of one frame (LTXConditionPipeline's), as BCHW."""
    return latents.squeeze(2) if latents.ndim == 5 else latents.transpose(1, 2).unflatten(2, size)


def places_of_cells(height: int, width: int, cell: int) -> Tensor:
    """Return second, top and left (px) of each latent cell, shape (3, height * width); a picture is at second 0."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows * cell, columns * cell]).flatten(1).float()


def cell_px(family: Family) -> int:
    """Return how many pixels wide one latent is, as the VAE counts it."""
    config = family.vae_config
    return config.get("spatial_compression_ratio") or config["patch_size"] * 2 ** sum(config["spatio_temporal_scaling"])


def max_length(family: Family) -> int:
    """Return the longest prompt in tokens that the published pipeline takes by default."""
    return 256 if family.index["_class_name"] == "LTXConditionPipeline" else 128


def build_tiny() -> Any:
    """Return a pipeline as that of 0.9.5, with a transformer of about 0.7 million parameters."""
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXConditionPipeline,
        LTXVideoTransformer3DModel,
    )

    tokenizer = build_t5_tokenizer()
    vae = AutoencoderKLLTXVideo(**TINY_VAE)
    channels = TINY_VAE["latent_channels"]
    vae.register_buffer("latents_mean", torch.linspace(-0.1, 0.1, channels))
    vae.register_buffer("latents_std", torch.linspace(0.25, 0.35, channels))
    return LTXConditionPipeline(
        vae=vae,
        text_encoder=build_t5(tokenizer, width=64),
        tokenizer=tokenizer,
        transformer=LTXVideoTransformer3DModel(**TINY_TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


TINY_VAE: dict[str, Any] = {
    "latent_channels": 8,
    "block_out_channels": [16, 32],
    "down_block_types": ["LTXVideo095DownBlock3D"],
    "layers_per_block": [1, 1],
    "spatio_temporal_scaling": [True],
    "downsample_type": ["spatiotemporal"],
    "decoder_block_out_channels": [16],
    "decoder_layers_per_block": [1, 1],
    "decoder_spatio_temporal_scaling": [True],
    "decoder_inject_noise": [False, False],
    "upsample_residual": [True],
    "upsample_factor": [2],
    "timestep_conditioning": True,
    "patch_size": 4,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 2,
}

TINY_TRANSFORMER: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "cross_attention_dim": 128,
    "num_layers": 2,
    "caption_channels": 64,
}

LTXVIDEO = Traits(
    pipelines=("LTXPipeline", "LTXConditionPipeline"),
    build_tiny=build_tiny,
    objective=flow_matching,
    encode=encode,
    predict=predict,
    max_length=max_length,
    draw_arguments=of_one_frame,
    drawn_latents=unpacked,
)
