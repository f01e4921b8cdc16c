"""AuraFlow: a flow-matching transformer of joint and single blocks, with Pile-T5 text (a UMT5 encoder).

Positions are learned for a square of patches, of which a picture takes the middle. Attention has no mask; padded text
is zero.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from torch import Tensor, nn

from simpletuner.errors import DataError
from simpletuner.models.family import Conditioning, Family, Traits
from simpletuner.models.objectives import flow_matching
from simpletuner.models.text_encoding import encoded_with_mask
from simpletuner.models.tiny import build_t5_tokenizer, build_umt5, load_vae


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return prompt_embeds (B, max_length, D), zero after each caption's end, and their mask (B, max_length)."""
    encoded = encoded_with_mask(family, pipeline, captions)
    each_number = encoded["prompt_attention_mask"].view(encoded["prompt_embeds"].shape)
    return encoded | {"prompt_attention_mask": each_number[..., 0].clone()}


def predict(
    family: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call the transformer as AuraFlowPipeline does. Raises DataError for latents beyond its positions."""
    check_positions(family, noisy_BCHW)
    return model(
        noisy_BCHW,
        encoder_hidden_states=conditioning["prompt_embeds"].to(noisy_BCHW.dtype),
        timestep=timesteps_B,
        return_dict=False,
    )[0]


def check_positions(family: Family, latents_BCHW: Tensor) -> None:
    """Raise DataError for latents beyond the learned positions: the transformer would read wrong ones, or crash."""
    side = isqrt(family.config["pos_embed_max_size"]) * family.config["patch_size"]
    height, width = latents_BCHW.shape[-2:]
    if max(height, width) > side:
        raise DataError(
            f"latents of {width} x {height} are beyond the {side} x {side} that this model has positions for",
            "set a smaller resolution, or a dataset's maximum_aspect_ratio and minimum_aspect_ratio",
        )


def build_tiny() -> Any:
    """Return an AuraFlow pipeline with a transformer of about 1 million parameters."""
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    tokenizer, transformer = build_t5_tokenizer(), AuraFlowTransformer2DModel(**TINY_TRANSFORMER)
    transformer.time_step_proj.linear_2.weight.data.mul_(20)  # else gates are so small that text changes nothing
    return AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=build_umt5(tokenizer, width=64),
        vae=load_vae(),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


TINY_TRANSFORMER: dict[str, Any] = {
    "sample_size": 16,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 4 * 24,
}

AURAFLOW = Traits(
    pipelines=("AuraFlowPipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    encode=encode,
    predict=predict,
    max_length=lambda _: 256,
)
