"""Sana: a flow-matching transformer with linear attention over latents that are 32 px wide, with Gemma-2
text.

Sana 1.5 differs by normalized queries and keys.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import Tensor, nn

from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.text_encoding import Conditioning, encode_with_mask

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Sana(ModelFamily):
    """Sana 1.0 and 1.5."""

    pipelines = ("SanaPipeline",)
    # By default the pipeline samples at the nearest size of its own list, and cleans captions if it can.
    pipeline_options = {"use_resolution_binning": False, "clean_caption": False}
    padding_mask = "prompt_attention_mask"
    objective = flow_matching
    text_width = "caption_channels"

    def default_max_length(self) -> int:
        return 300

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode captions after the instruction to describe them in more detail that the pipeline has by
        default.

        Of Gemma's tokens for both, the pipeline keeps the first one and the last 299.
        """
        instruction = inspect.signature(type(pipeline).__call__).parameters["complex_human_instruction"].default
        return encode_with_mask(self, pipeline, captions, complex_human_instruction=instruction)

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        return model(
            noised_BCHW,
            encoder_hidden_states=conditioning["prompt_embeds"].to(noised_BCHW.dtype),
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            timestep=timesteps_B * 1000 * self.config.get("timestep_scale", 1.0),
            return_dict=False,
        )[0]
