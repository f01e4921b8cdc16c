"""Stable Diffusion 3 and 3.5: a flow-matching transformer with two CLIP encoders and T5-XXL.

Both CLIPs' tokens stand side by side in one sequence, filled up with zeros to T5's width, and T5's tokens follow.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from simpletuner.models.family import Conditioning, Family, Traits
from simpletuner.models.objectives import flow_matching
from simpletuner.models.tiny import build_clip, build_clip_tokenizer, build_t5, build_t5_tokenizer, load_vae


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, 77 + max_length, D) and the pooled ones (B, P)."""
    embeds, _, pooled, _ = pipeline.encode_prompt(
        captions, None, None, do_classifier_free_guidance=False, max_sequence_length=family.max_length
    )
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def predict(_: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
    """Call the transformer as StableDiffusion3Pipeline does: it cuts patches itself and is told time in 0..1000."""
    dtype = noisy_BCHW.dtype
    return model(
        hidden_states=noisy_BCHW,
        timestep=timesteps_B * 1000,
        encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
        pooled_projections=conditioning["pooled_prompt_embeds"].to(dtype),
        return_dict=False,
    )[0]


def build_tiny() -> Any:
    """Return a 3.5 medium pipeline with a transformer of about 0.4 million parameters."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    return StableDiffusion3Pipeline(
        vae=load_vae(),
        text_encoder=build_clip(clip_tokenizer, width=16, projection=True),
        text_encoder_2=build_clip(clip_tokenizer, width=32, projection=True),
        text_encoder_3=build_t5(t5_tokenizer, width=64),
        tokenizer=clip_tokenizer,
        tokenizer_2=clip_tokenizer,
        tokenizer_3=t5_tokenizer,
        transformer=SD3Transformer2DModel(**TINY_TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


TINY_TRANSFORMER: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 16 + 32,
    "pos_embed_max_size": 64,
    "dual_attention_layers": [0],
    "qk_norm": "rms_norm",
}

SD3 = Traits(
    pipelines=("StableDiffusion3Pipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    encode=encode,
    predict=predict,
    max_length=lambda _: 256,  # as the pipeline's own; 3.5 was trained on 77 and on 256 tokens
)
