"""Lumina Image 2.0: a flow-matching transformer that reads captions and latents as one sequence, with Gemma-2 text.

Its time runs the other way, 0 being noise, and so its answer points from noise to data.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from simpletuner.errors import SettingsError
from simpletuner.models.family import Conditioning, Family, Traits
from simpletuner.models.objectives import flow_matching
from simpletuner.models.text_encoding import encoded_with_mask
from simpletuner.models.tiny import build_gemma, build_gemma_tokenizer


def encode(family: Family, pipeline: Any, captions: list[str]) -> Conditioning:
    """Return embeddings and mask of captions after the pipeline's system prompt.

    Raises SettingsError when captions may be longer than the transformer has positions for.
    """
    positions = family.config["axes_lens"][0] - 1  # the picture takes the position after the caption
    if family.max_length > positions:
        raise SettingsError(
            f"tokenizer_max_length is {family.max_length}, but this model has positions for {positions} tokens",
            f"set --tokenizer_max_length={positions} or less",
        )
    return encoded_with_mask(family, pipeline, captions)


def predict(_: Family, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
    """Call the transformer as Lumina2Pipeline does, and turn its answer round."""
    return -model(
        hidden_states=noisy_BCHW,
        timestep=1 - timesteps_B,
        encoder_hidden_states=conditioning["prompt_embeds"].to(noisy_BCHW.dtype),
        encoder_attention_mask=conditioning["prompt_attention_mask"],
        return_dict=False,
    )[0]


def build_tiny() -> Any:
    """Return a Lumina 2 pipeline with a transformer of about 1 million parameters.

    Its VAE is random, since the pipeline takes latents to be 8 px wide, whatever its VAE says.
    """
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    tokenizer = build_gemma_tokenizer()
    return Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(**TINY_TRANSFORMER),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=AutoencoderKL(**TINY_VAE),
        text_encoder=build_gemma(tokenizer, width=32),
        tokenizer=tokenizer,
    )


TINY_VAE: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 16, 16, 16],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "scaling_factor": 4.0,
    "shift_factor": 0.13,
}

TINY_TRANSFORMER: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "hidden_size": 96,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 32,
    "axes_dim_rope": [8, 8, 8],
    "cap_feat_dim": 32,
}

LUMINA2 = Traits(
    pipelines=("Lumina2Pipeline",),
    build_tiny=build_tiny,
    objective=flow_matching,
    encode=encode,
    predict=predict,
    max_length=lambda _: 256,
)
