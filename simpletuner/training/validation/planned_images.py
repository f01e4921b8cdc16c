"""Images and clips that each round of validation generates, with their sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.preparation.sampled_prompts import SampledPrompt
from simpletuner.settings import Settings
from simpletuner.training.images.clip_files import require_video_writer
from simpletuner.training.images.image_files import ImageInfo


@dataclass(frozen=True)
class PlannedImage:
    """An image of each round: its encoded prompts, and its sampling parameters."""

    prompt: SampledPrompt
    sampling: SamplingParams

    def info(self, variant: str, step: int) -> ImageInfo:
        params = self.sampling
        return ImageInfo(
            self.prompt.prompt.prompt,
            self.prompt.negative_prompt,
            params.seed,
            params.steps,
            params.guidance,
            params.shape.width,
            params.shape.height,
            step,
            variant,
            params.shape.frames,
            params.fps if params.shape.frames > 1 else 0.0,
        )

    def digest(self, model: str) -> str:
        """Return a hash of all that a sample of a model that does not change depends on."""
        params = self.sampling
        made = xxhash.xxh3_128(
            repr((model, params.shape, params.steps, params.guidance, params.seed, params.fps)).encode()
        )
        for image in params.references:
            made.update(repr(image.size).encode() + image.tobytes())
        for conditioning in (self.prompt.positive, self.prompt.negative):
            for name, value in sorted(conditioning.items()):
                made.update(f"{name} {value.dtype} {list(value.shape)}".encode())
                made.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return made.hexdigest()


def plan_images(settings: Settings, family: ModelFamily, sampled: Sequence[SampledPrompt]) -> list[PlannedImage]:
    """Return the images and clips of each round. Each prompt has its own seed, whichever rank samples it.

    Raises EnvironmentNotReady for clips where nothing can write them.
    """
    if any(each.shape.frames > 1 for each in sampled):
        require_video_writer()
    return [planned_image(settings, family, each) for each in sampled]


def planned_image(settings: Settings, family: ModelFamily, sampled: SampledPrompt) -> PlannedImage:
    validation, prompt = settings.validation, sampled.prompt
    seed = settings.training.seed if validation.validation_seed is None else validation.validation_seed
    sampling = SamplingParams(
        shape=sampled.shape,
        steps=prompt.num_inference_steps or validation.validation_num_inference_steps,
        guidance=validation.validation_guidance if prompt.guidance is None else prompt.guidance,
        seed=seed + sampled.number if prompt.seed is None else prompt.seed,
        fps=validation.framerate or family.frame_rate,
        references=sampled.references,
    )
    return PlannedImage(sampled, sampling)
