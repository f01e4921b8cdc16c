"""Lumina Image 2.0: a flow-matching transformer over captions and latents in one sequence; Gemma-2 text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.text_encoding import Conditioning, encode_with_mask
from simpletuner.parallel.context.context_parallel import TOKENS, SequencePlan

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Lumina2(ModelFamily):
    """Lumina Image 2.0."""

    pipelines = ("Lumina2Pipeline",)
    padding_mask = "prompt_attention_mask"
    objective = flow_matching
    text_width = "cap_feat_dim"
    # The two blocks that read the text alone stay whole. What joins text and image needs the whole image.
    sequence_plan = SequencePlan(
        attention={
            "noise_refiner.*.attn": ("noise_refiner.0.hidden_states",),
            "layers.*.attn": ("layers.0.hidden_states",),
        },
        gathered={"noise_refiner.-1": "noise_refiner.0.hidden_states", "norm_out": "layers.0.hidden_states"},
        splits={
            "rope_embedder": {2: TOKENS, 3: TOKENS},  # rotary tables: of the image, of text and image
            "noise_refiner.0": {"hidden_states": TOKENS},
            "layers.0": {"hidden_states": TOKENS},
        },
    )

    def default_max_length(self) -> int:
        return 256

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode captions after the pipeline's system prompt.

        Raises SettingsError when captions may be longer than the transformer has positions for.
        """
        positions = self.config["axes_lens"][0] - 1  # the image takes the position after the caption
        if self.max_length > positions:
            raise SettingsError(
                f"tokenizer_max_length is {self.max_length}, but this model has positions for {positions} tokens",
                f"set --tokenizer_max_length={positions} or less",
            )
        return encode_with_mask(self, pipeline, captions)

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as Lumina2Pipeline does: time 0 is noise, prediction is latents - noise."""
        return -model(
            hidden_states=noised_BCHW,
            timestep=1 - timesteps_B,
            encoder_hidden_states=conditioning["prompt_embeds"].to(noised_BCHW.dtype),
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            return_dict=False,
        )[0]
