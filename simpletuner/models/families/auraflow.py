"""AuraFlow: a flow-matching transformer of joint and single blocks, with Pile-T5 text (a UMT5 encoder)."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from torch import Tensor, nn

from simpletuner.errors import DataError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.text_encoding import Conditioning, encode_with_mask
from simpletuner.parallel.context.context_parallel import TOKENS, SequencePlan

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class AuraFlow(ModelFamily):
    pipelines = ("AuraFlowPipeline",)
    objective = flow_matching
    fuses_qkv = True
    sequence_plan = SequencePlan(
        attention=dict.fromkeys(
            ("joint_transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
            ("joint_transformer_blocks.0.encoder_hidden_states", "joint_transformer_blocks.0.hidden_states"),
        ),
        gathered={"proj_out": "joint_transformer_blocks.0.hidden_states"},
        splits={"joint_transformer_blocks.0": {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS}},
    )

    def default_max_length(self) -> int:
        return 256

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, max_length, D), zero after each caption's end, and mask (B,
        max_length)."""
        encoded = encode_with_mask(self, pipeline, captions)
        # The pipeline repeats the mask for every channel of the embeddings; one is enough to cache.
        mask = encoded["prompt_attention_mask"].view(encoded["prompt_embeds"].shape)
        return encoded | {"prompt_attention_mask": mask[..., 0].clone()}

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as AuraFlowPipeline does. Raises DataError for more latents than positions."""
        self.check_positions(noised_BCHW)
        return model(
            noised_BCHW,
            encoder_hidden_states=conditioning["prompt_embeds"].to(noised_BCHW.dtype),
            timestep=timesteps_B,
            return_dict=False,
        )[0]

    def check_positions(self, latents_BCHW: Tensor) -> None:
        # Positions are learned for a square of patches, of which an image takes the middle. For a larger
        # image the transformer would read the wrong ones, or crash.
        side = isqrt(self.config["pos_embed_max_size"]) * self.config["patch_size"]
        height, width = latents_BCHW.shape[-2:]
        if max(height, width) > side:
            raise DataError(
                f"latents of {width} x {height} are beyond the {side} x {side} that this model has positions for",
                "set a smaller resolution, or a dataset's maximum_aspect_ratio and minimum_aspect_ratio",
            )
