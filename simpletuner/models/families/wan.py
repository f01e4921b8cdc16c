"""Wan: a flow-matching transformer over patches of a film, with UMT5-XXL text; a picture is a film of one frame.

Wan 2.2 TI2V-5B tells every token its own time, since it may be given a clean first frame; in a picture all are equal.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from simpletuner.models.family import Conditioning, Family, Traits, of_one_frame
from simpletuner.models.objectives import flow_matching
from simpletuner.models.tiny import build_t5_tokenizer, build_umt5


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, max_length, D), zero after each caption's end: Wan attends to that, too."""
    embeds, _ = pipeline.encode_prompt(
        captions, do_classifier_free_guidance=False, max_sequence_length=family.max_length
    )
    return {"prompt_embeds": embeds}


def predict(
    family: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call the transformer as WanPipeline does."""
    timesteps = timesteps_B * 1000
    if family.index.get("expand_timesteps"):
        timesteps = timesteps[:, None].expand(-1, tokens_of(family, noisy_BCHW))
    film_BCFHW = model(
        hidden_states=noisy_BCHW.unsqueeze(2),
        timestep=timesteps,
        encoder_hidden_states=conditioning["prompt_embeds"].to(noisy_BCHW.dtype),
        return_dict=False,
    )[0]
    return film_BCFHW.squeeze(2)


def tokens_of(family: Family, latents_BCHW: Tensor) -> int:
    """Return how many patches one picture's latents have."""
    _, patch_height, patch_width = family.config["patch_size"]
    return (latents_BCHW.shape[2] // patch_height) * (latents_BCHW.shape[3] // patch_width)


def build_tiny() -> Any:
    """Return a pipeline with a transformer of about 0.6 million parameters."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    tokenizer = build_t5_tokenizer()
    return WanPipeline(
        vae=AutoencoderKLWan(**TINY_VAE),
        text_encoder=build_umt5(tokenizer, width=64),
        tokenizer=tokenizer,
        transformer=WanTransformer3DModel(**TINY_TRANSFORMER),
        scheduler=UniPCMultistepScheduler(**TINY_SCHEDULER),
    )


TINY_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 2, 2],
    "num_res_blocks": 1,
    "latents_mean": [0.27, 0.28, -0.35, 0.23],
    "latents_std": [0.12, 0.09, 0.11, 0.1],
}

TINY_TRANSFORMER: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "text_dim": 64,
    "freq_dim": 64,
    "ffn_dim": 256,
    "num_layers": 2,
}

TINY_SCHEDULER: dict[str, Any] = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}

WAN = Traits(
    pipelines=("WanPipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    encode=encode,
    predict=predict,
    max_length=lambda _: 512,
    draw_arguments=of_one_frame,
    drawn_latents=lambda film_BCFHW, _: film_BCFHW.squeeze(2),
)
