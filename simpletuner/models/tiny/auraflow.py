"""A tiny AuraFlow: a transformer of about 1 million parameters."""

from __future__ import annotations

from typing import Any

from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

from simpletuner.models.tiny.encoders import build_umt5, load_vae
from simpletuner.models.tiny.tokenizers import build_t5_tokenizer

TRANSFORMER: dict[str, Any] = {
    "sample_size": 16,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 4 * 24,
}


def build() -> AuraFlowPipeline:
    tokenizer, transformer = build_t5_tokenizer(), AuraFlowTransformer2DModel(**TRANSFORMER)
    # With the random weights as they are the gates are so small that text changes nothing.
    transformer.time_step_proj.linear_2.weight.data.mul_(20)
    return AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=build_umt5(tokenizer, width=64),
        vae=load_vae(),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )
