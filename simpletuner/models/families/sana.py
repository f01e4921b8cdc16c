"""Sana: a flow-matching transformer with linear attention over latents that are 32 px wide, with Gemma-2 text.

Captions follow an instruction to describe them in more detail; of what Gemma makes of both, the first token and the
last 299 are read. Sana 1.5 differs by normalised queries and keys.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from simpletuner.models.families.pixart_sigma import draw_arguments
from simpletuner.models.family import Conditioning, Family, Traits
from simpletuner.models.objectives import flow_matching
from simpletuner.models.text_encoding import encoded_with_mask
from simpletuner.models.tiny import build_gemma, build_gemma_tokenizer


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return embeddings and mask of captions after the instruction that the pipeline gives by default."""
    instruction = inspect.signature(type(pipeline).__call__).parameters["complex_human_instruction"].default
    return encoded_with_mask(family, pipeline, captions, complex_human_instruction=instruction)


def predict(
    family: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call the transformer as SanaPipeline does."""
    return model(
        noisy_BCHW,
        encoder_hidden_states=conditioning["prompt_embeds"].to(noisy_BCHW.dtype),
        encoder_attention_mask=conditioning["prompt_attention_mask"],
        timestep=timesteps_B * 1000 * family.config.get("timestep_scale", 1.0),
        return_dict=False,
    )[0]


def build_tiny() -> Any:
    """Return a Sana 1.5 pipeline with a transformer of about 500 thousand parameters, and latents 8 px wide."""
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    tokenizer = build_gemma_tokenizer()
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_gemma(tokenizer, width=32),
        vae=AutoencoderDC(**TINY_VAE),
        transformer=SanaTransformer2DModel(**TINY_TRANSFORMER),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )


TINY_VAE: dict[str, Any] = {
    "latent_channels": 8,
    "attention_head_dim": 8,
    "encoder_block_types": ["ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"],
    "decoder_block_types": ["ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"],
    "encoder_block_out_channels": [8, 16, 32, 32],
    "decoder_block_out_channels": [8, 16, 32, 32],
    "encoder_layers_per_block": [1, 1, 1, 1],
    "decoder_layers_per_block": [1, 1, 1, 1],
    "encoder_qkv_multiscales": [[], [], [], [5]],
    "decoder_qkv_multiscales": [[], [], [], [5]],
    "scaling_factor": 0.44,
}

TINY_TRANSFORMER: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 6,
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 24,
    "cross_attention_dim": 6 * 16,
    "caption_channels": 32,
    "sample_size": 8,
    "qk_norm": "rms_norm_across_heads",
}

SANA = Traits(
    pipelines=("SanaPipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    encode=encode,
    predict=predict,
    max_length=lambda _: 300,
    draw_arguments=draw_arguments,
)
