"""LTX-Video: a flow-matching transformer over latent cells of a video, with T5-XXL text; an image is a single frame.

0.9.0 is published as an LTXPipeline, 0.9.5 as an LTXConditionPipeline, with longer prompts and a decoder that denoises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.family.base import ModelFamily, SamplingParams
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.context.context_parallel import TOKENS, SequencePlan
from simpletuner.settings.values.shape import Shape


class LTXVideo(ModelFamily):
    """LTX-Video 0.9."""

    pipelines = ("LTXPipeline", "LTXConditionPipeline")
    float32_inputs = ("timestep", "video_coords")
    padding_mask = "prompt_attention_mask"
    objective = flow_matching
    text_width = "caption_channels"
    # The plan of its class also splits the text, which only cross-attention reads: whole, it needs no exchange.
    sequence_plan = SequencePlan(
        attention={"transformer_blocks.*.attn1": ("hidden_states",)},
        gathered={"proj_out": "hidden_states"},
        splits={
            "": {"hidden_states": TOKENS},
            "rope": {0: TOKENS, 1: TOKENS},
        },
    )

    def default_max_length(self) -> int:
        return 256 if self.index["_class_name"] == "LTXConditionPipeline" else 128

    def encode_prompts(self, pipeline: Any, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, max_length, D) and prompt_attention_mask (B, max_length)."""
        embeds, mask, _, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as LTXConditionPipeline does."""
        batch, _, height, width = noised_BCHW.shape
        # LTXPipeline gives positions as rows, columns and a scale, which for one frame are the same numbers.
        coords = video_coords(height, width, self.cell_px(), noised_BCHW.device)
        tokens = model(
            hidden_states=noised_BCHW.flatten(2).transpose(1, 2),
            encoder_hidden_states=conditioning["prompt_embeds"].to(noised_BCHW.dtype),
            timestep=timesteps_B[:, None] * 1000,
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            video_coords=coords.expand(batch, -1, -1),
            return_dict=False,
        )[0]
        return self.unpack_latents(tokens, Shape(1, height, width))

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, Any]:
        return super().pipeline_kwargs(positive, negative, sampling) | {"num_frames": 1}

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        # LTXPipeline returns tokens (B, height * width, C), LTXConditionPipeline a video of one frame.
        return latents.squeeze(2) if latents.ndim == 5 else latents.transpose(1, 2).unflatten(2, shape[1:])

    def cell_px(self) -> int:
        """Width of one latent cell in px."""
        # As AutoencoderKLLTXVideo computes it where its config, such as that of 0.9.0, does not state it.
        ratio = self.vae_config.get("spatial_compression_ratio")
        return ratio or self.vae_config["patch_size"] * 2 ** sum(self.vae_config["spatio_temporal_scaling"])


def video_coords(height: int, width: int, cell_px: int, device: torch.device) -> Tensor:
    """Second, top and left (px) of each latent cell, shape (3, height * width); an image is at second 0."""
    rows, columns = torch.meshgrid(*(torch.arange(side, device=device) for side in (height, width)), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows * cell_px, columns * cell_px]).flatten(1).float()
