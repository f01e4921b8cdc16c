"""Wan: a flow-matching transformer over patches of a video, with UMT5-XXL text; an image is a single-frame
video.

Wan 2.2 A14B has two of them, one for noise levels from `boundary_ratio` up and one for those below. A run
trains one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn

from simpletuner.data.prefetch import FIRST_FRAME
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.two_denoisers import (
    FIRST,
    SECOND,
    chosen_denoiser,
    condition_on_first_frame,
    load_frozen,
    per_token_timesteps,
)
from simpletuner.models.folder.diffusers_io import diffusers_class
from simpletuner.parallel.context.context_parallel import SequencePlan
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


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

    @classmethod
    def variants(cls) -> tuple[type[ModelFamily], ...]:
        return (WanImageToVideo,)

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
        if not self.other_denoiser:
            return super().facts()
        low, high = self.sigma_range
        return {**super().facts(), "denoiser": f"{self.denoiser_name}, for noise levels {low:g} to {high:g}"}

    def sampling_components(self, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        if self.other_denoiser and not self._frozen:
            folder, variant = self.folder / self.other_denoiser, self.settings.model.variant
            self._frozen = {self.other_denoiser: load_frozen(folder, variant, device, dtype, self.float32_inputs)}
        return self._frozen

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, max_length, D), zero after a caption's end: Wan attends to padding."""
        embeds, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        return {"prompt_embeds": embeds}

    @property
    def image_to_video(self) -> Literal["never", "optional", "always"]:
        return "optional" if self.index.get("expand_timesteps") else "never"

    @property
    def image_to_video_class(self) -> Any:
        return diffusers_class("WanImageToVideoPipeline")

    def reference_kwargs(self, references: Sequence[Image]) -> dict[str, object]:
        return {"image": references[0]}

    def predict(self, model: nn.Module, noised: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as WanPipeline does, or WanImageToVideoPipeline with a first frame."""
        timesteps, shape = timesteps_B * 1000, Shape.of_axes(noised.shape[2:])
        first_frame = conditioning.get(FIRST_FRAME)
        # Wan 2.2 TI2V-5B has a timestep for each token: 0 for those of a given first frame.
        if self.index.get("expand_timesteps"):
            tokens = Shape(*(cells // side for cells, side in zip(shape, self.config["patch_size"], strict=True)))
            if first_frame is None:
                timesteps = per_token_timesteps(timesteps, tokens)
            else:
                noised, timesteps = condition_on_first_frame(first_frame, noised, timesteps, tokens)
        elif first_frame is not None:
            noised = torch.cat([noised, self.mask_of_first(first_frame), first_frame], dim=1).to(noised.dtype)
        image = conditioning.get("image_embeds")
        video_BCFHW = model(
            hidden_states=noised.unsqueeze(2) if noised.ndim == 4 else noised,
            **({} if image is None else {"encoder_hidden_states_image": image.to(noised.dtype)}),
            timestep=timesteps,
            encoder_hidden_states=conditioning["prompt_embeds"].to(noised.dtype),
            return_dict=False,
        )[0]
        return self.unpack_latents(video_BCFHW, shape)

    def mask_of_first(self, latents_BCFHW: Tensor) -> Tensor:
        """Mask with 1 for each given frame of the video, with a channel per frame of a latent frame."""
        mask = torch.zeros_like(latents_BCFHW[:, :1]).repeat(1, self.cell.frames, 1, 1, 1)
        mask[:, :, 0] = 1
        return mask

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        return super().pipeline_kwargs(positive, negative, sampling) | {"num_frames": sampling.shape.frames}

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return latents.squeeze(2) if shape.frames == 1 else latents


class WanImageToVideo(Wan):
    """Wan that continues a first frame: 2.2 A14B reads its latents, 2.1 the embedding of a CLIP as well."""

    pipelines = ("WanImageToVideoPipeline",)
    tiny_pipeline = ""
    most_references = 1
    encodes_first_frame = True

    @property
    def image_to_video(self) -> Literal["never", "optional", "always"]:
        return "always"

    @property
    def reads_references(self) -> bool:
        return self.config.get("image_dim") is not None

    def encode_edits(
        self, pipeline: DiffusionPipeline, captions: list[str], references: Sequence[Image]
    ) -> Conditioning:
        """Encode to prompt_embeds, and to image_embeds (B, 257, D) of the first frame."""
        embeds = pipeline.encode_image(references[0], pipeline._execution_device)
        return self.encode_prompts(pipeline, captions) | {"image_embeds": embeds.expand(len(captions), -1, -1)}

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        texts = ({name: each[name] for name in each if name != "image_embeds"} for each in (positive, negative))
        return super().pipeline_kwargs(*texts, sampling)

    def enter_pipeline(self, pipeline: DiffusionPipeline, positive: Conditioning) -> None:
        # Its call refuses an image together with its embedding, and needs the image for the latents.
        pipeline.encode_image = lambda image, device: positive["image_embeds"]

    def input_shapes(
        self, target: Shape, references: Sequence[Shape] = (), has_first_frame: bool = False, has_sound: bool = False
    ) -> dict[str, tuple[int, ...]]:
        latents = (self.config["out_channels"], *target.in_cells(self.cell).axes)
        return {"latents": latents, FIRST_FRAME: latents, **self.conditioning_shapes()}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        image = {"image_embeds": (CLIP_PATCHES, self.config["image_dim"])} if self.reads_references else {}
        return super().conditioning_shapes() | image


# Tokens of an image of 224 x 224 px in patches of 14, and the one of the whole.
CLIP_PATCHES = 257
