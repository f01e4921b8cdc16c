"""LTX-Video: a flow-matching transformer over latent cells of a video, with T5-XXL text; an image is a single
frame.

0.9.0 is published as an LTXPipeline, 0.9.5 as an LTXConditionPipeline, with longer prompts and a decoder that
denoises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from simpletuner.data.prefetch import FIRST_FRAME
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.two_denoisers import condition_on_first_frame
from simpletuner.models.folder.diffusers_io import diffusers_class
from simpletuner.parallel.context.context_parallel import TIMES, TOKENS, SequencePlan
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# Frames per second of a clip: the default of both pipelines.
FRAME_RATE = 25
# Noise in a first frame, times the square of the noise level: the default of LTXConditionPipeline.
NOISE_OF_FIRST = 0.15


class LTXVideo(ModelFamily):
    """LTX-Video 0.9."""

    pipelines = ("LTXPipeline", "LTXConditionPipeline")
    float32_inputs = ("timestep", "video_coords")
    frame_rate = FRAME_RATE
    padding_mask = "prompt_attention_mask"
    objective = flow_matching
    text_width = "caption_channels"
    # Its class's plan also splits the text; only cross-attention reads that: whole, it needs no exchange.
    sequence_plan = SequencePlan(
        attention={"transformer_blocks.*.attn1": ("hidden_states",)},
        gathered={"proj_out": "hidden_states"},
        splits={
            "": {"hidden_states": TOKENS, "timestep": TIMES},
            "rope": {0: TOKENS, 1: TOKENS},
        },
    )

    def default_max_length(self) -> int:
        return 256 if self.is_conditioned else 128

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, max_length, D) and prompt_attention_mask (B, max_length)."""
        embeds, mask, _, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        return {"prompt_embeds": embeds, "prompt_attention_mask": mask}

    def predict(self, model: nn.Module, noised: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as LTXConditionPipeline does, or `image_to_video_class` with a first frame."""
        shape, timesteps = Shape.of_axes(noised.shape[2:]), timesteps_B[:, None] * 1000
        if FIRST_FRAME in conditioning:
            first = self.first_shown(conditioning[FIRST_FRAME], noised[:, :, :1], timesteps_B)
            noised, timesteps = condition_on_first_frame(first, noised, timesteps_B * 1000, shape)
        # LTXPipeline gives frames, rows, columns and a scale, which are the same numbers.
        coords = video_coords(shape, self.cell, self.is_conditioned, noised.device)
        tokens = model(
            hidden_states=noised.flatten(2).transpose(1, 2),
            encoder_hidden_states=conditioning["prompt_embeds"].to(noised.dtype),
            timestep=timesteps,
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            video_coords=coords.expand(len(noised), -1, -1),
            return_dict=False,
        )[0]
        return self.unpack_latents(tokens, shape)

    @property
    def image_to_video(self) -> Literal["never", "optional", "always"]:
        return "optional"

    @property
    def image_to_video_class(self) -> Any:
        return self.pipeline_class if self.is_conditioned else diffusers_class("LTXImageToVideoPipeline")

    def first_shown(self, clean: Tensor, noised: Tensor, sigmas_B: Tensor) -> Tensor:
        """First latent frame as the pipeline shows it: clean, or with a little of the clip's own noise."""
        if not self.is_conditioned:
            return clean
        sigma = sigmas_B.view(-1, 1, 1, 1, 1)
        share_of_noise = noised.float() - (1 - sigma) * clean
        return clean + NOISE_OF_FIRST * sigma * share_of_noise

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        return super().pipeline_kwargs(positive, negative, sampling) | {
            "num_frames": sampling.shape.frames,
            "frame_rate": FRAME_RATE,
        }

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return as_video(latents, shape)

    @property
    def is_conditioned(self) -> bool:
        """True of 0.9.5, whose pipeline counts the first latent frame as the one frame that it is made of."""
        return self.index["_class_name"] == "LTXConditionPipeline"


def video_coords(shape: Shape, cell: Shape, has_short_first_frame: bool, device: torch.device) -> Tensor:
    """Second, top and left (px) of each latent cell, (3, frames * height * width), from second 0."""
    frames, rows, columns = torch.meshgrid(*(torch.arange(side, device=device) for side in shape), indexing="ij")
    first = frames * cell.frames
    if has_short_first_frame:
        first = (first + 1 - cell.frames).clamp(min=0)
    return torch.stack([first / FRAME_RATE, rows * cell.height, columns * cell.width]).flatten(1)


def as_video(latents: Tensor, shape: Shape) -> Tensor:
    """Convert what LTX's pipelines return to BCFHW, or BCHW of an image."""
    # LTXPipeline returns tokens (B, frames * height * width, C), those with conditions or sound a video.
    video_BCFHW = latents if latents.ndim == 5 else latents.transpose(1, 2).unflatten(2, shape)
    return video_BCFHW.squeeze(2) if shape.frames == 1 else video_BCFHW
