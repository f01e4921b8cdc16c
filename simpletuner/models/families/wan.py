"""Wan: a flow-matching transformer over patches of a video, with UMT5-XXL text; an image is a single-frame video.

Wan 2.2 A14B has two of them, one for noise levels from `boundary_ratio` up and one for those below. A run trains one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.family.base import ModelFamily, SamplingParams
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.two_denoisers import FIRST, SECOND, chosen_denoiser, load_frozen
from simpletuner.parallel.context.context_parallel import SequencePlan
from simpletuner.settings.values.shape import Shape


class Wan(ModelFamily):
    """Wan 2.1 and 2.2."""

    pipelines = ("WanPipeline",)
    objective = flow_matching
    text_width = "text_dim"
    frame_rate = 16
    fuses_qkv = True
    sequence_plan = SequencePlan(
        attention={"blocks.*.attn1": ("blocks.0.hidden_states",)}, gathered={"proj_out": "blocks.0.hidden_states"}
    )

    def default_max_length(self) -> int:
        return 512

    def choose_denoiser(self) -> None:
        self.denoiser_name, self.other_denoiser = chosen_denoiser(self.folder, self.index, self.settings.model)
        self._frozen: dict[str, nn.Module] = {}
        if self.denoiser_name == SECOND:
            self.lora_options = {"load_into_transformer_2": True}

    @property
    def sigma_range(self) -> tuple[float, float]:
        """The range of the trained denoiser; WanPipeline calls the first one at the boundary itself."""
        if not self.other_denoiser:
            return super().sigma_range
        boundary = self.index["boundary_ratio"]
        return (boundary, 1.0) if self.denoiser_name == FIRST else (0.0, boundary)

    @property
    def lora_prefix(self) -> str:
        return FIRST  # also of a LoRA that is loaded into the second

    def facts(self) -> Mapping[str, str]:
        low, high = self.sigma_range
        return (
            {"denoiser": f"{self.denoiser_name}, for noise levels {low:g} to {high:g}"} if self.other_denoiser else {}
        )

    def sampling_components(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        if self.other_denoiser and not self._frozen:
            folder, variant = self.folder / self.other_denoiser, self.settings.model.variant
            self._frozen = {self.other_denoiser: load_frozen(folder, variant, device, dtype, self.float32_inputs)}
        return self._frozen

    def encode_prompts(self, pipeline: Any, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, max_length, D), zero after each caption's end: Wan attends to padding, too."""
        embeds, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        return {"prompt_embeds": embeds}

    def predict(self, model: nn.Module, noised: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as WanPipeline does."""
        timesteps, shape = timesteps_B * 1000, Shape.of_axes(noised.shape[2:])
        # Wan 2.2 TI2V-5B has a timestep for each token, since its first frame may be given without noise. Here all are
        # equal.
        if self.index.get("expand_timesteps"):
            patch = Shape(*self.config["patch_size"])
            tokens = math.prod(cells // side for cells, side in zip(shape, patch, strict=True))
            timesteps = timesteps[:, None].expand(-1, tokens)
        video_BCFHW = model(
            hidden_states=noised.unsqueeze(2) if noised.ndim == 4 else noised,
            timestep=timesteps,
            encoder_hidden_states=conditioning["prompt_embeds"].to(noised.dtype),
            return_dict=False,
        )[0]
        return self.unpack_latents(video_BCFHW, shape)

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, Any]:
        return super().pipeline_kwargs(positive, negative, sampling) | {"num_frames": sampling.shape.frames}

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return latents.squeeze(2) if shape.frames == 1 else latents
