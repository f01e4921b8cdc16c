"""PixArt: a diffusion transformer that attends to T5-XXL text and also predicts its variance, which is
dropped.

Sigma reads 300 tokens. Alpha reads 120, and its 1024 px checkpoints are conditioned on each image's size and
aspect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletuner.data.images.geometry import Geometry
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import diffusion
from simpletuner.models.family.text_encoding import Conditioning, encode_with_mask
from simpletuner.parallel.context.context_parallel import TOKENS, SequencePlan

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ALPHA = "PixArtAlphaPipeline"


class PixArtSigma(ModelFamily):
    pipelines = ("PixArtSigmaPipeline", ALPHA)
    # By default the pipeline samples at the nearest size of its own list, and cleans captions if it can.
    pipeline_options = {"use_resolution_binning": False, "clean_caption": False}
    float32_inputs = ("timestep", "resolution", "aspect_ratio")
    padding_mask = "prompt_attention_mask"
    objective = diffusion
    text_width = "caption_channels"
    fuses_qkv = True
    sequence_plan = SequencePlan(
        attention={"transformer_blocks.*.attn1": ("transformer_blocks.0.hidden_states",)},
        gathered={"proj_out": "transformer_blocks.0.hidden_states"},
        splits={"transformer_blocks.0": {"hidden_states": TOKENS}},
    )

    def default_max_length(self) -> int:
        return 120 if self.index.get("_class_name") == ALPHA else 300

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        return encode_with_mask(self, pipeline, captions)

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as PixArtSigmaPipeline does, and drop the variance behind the noise."""
        noise_and_variance = model(
            noised_BCHW,
            encoder_hidden_states=conditioning["prompt_embeds"].to(noised_BCHW.dtype),
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            timestep=timesteps_B,
            added_cond_kwargs={name: conditioning.get(name) for name in ("resolution", "aspect_ratio")},
            return_dict=False,
        )[0]
        return noise_and_variance[:, : noised_BCHW.shape[1]]

    def size_conditioning(self, geometry: Geometry) -> Conditioning:
        """Original height and width in px, and height / width of the crop; float32, since bf16 rounds above
        256.

        Chen et al. 2023, arXiv:2310.00426, and how its training code fills them.
        """
        # As PixArtTransformer2DModel decides it: where the config leaves it open, by sample_size.
        wanted = self.config.get("use_additional_conditions")
        if not (self.config.get("sample_size") == 128 if wanted is None else wanted):
            return {}
        original, target = geometry.original, geometry.target
        return {
            "resolution": torch.tensor([float(original.height), float(original.width)]),
            "aspect_ratio": torch.tensor([target.height / target.width]),
        }
