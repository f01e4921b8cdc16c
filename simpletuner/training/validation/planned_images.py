"""Images and clips that each round of validation generates, with their sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simpletuner.models.family.base import ModelFamily, SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.preparation.drawn_prompts import DrawnPrompt
from simpletuner.settings import Settings
from simpletuner.training.images.clip_files import require_video_writer
from simpletuner.training.images.image_files import ImageInfo


@dataclass(frozen=True)
class PlannedImage:
    """An image of each round: its encoded prompts, and its sampling parameters."""

    name: str
    """Names the images of one round and set of weights; sorted by name, images of a prompt are neighbours."""
    number: int
    """Of its prompt."""
    prompt: str
    negative_prompt: str
    positive: Conditioning
    negative: Conditioning
    sampling: SamplingParams

    def info(self, variant: str, step: int) -> ImageInfo:
        params = self.sampling
        return ImageInfo(
            self.prompt,
            self.negative_prompt,
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


def plan_images(settings: Settings, family: ModelFamily, drawn: Sequence[DrawnPrompt]) -> list[PlannedImage]:
    """Return the images and clips of each round. Each prompt has its own seed, whichever rank samples it.

    Raises EnvironmentNotReady for clips where nothing can write them.
    """
    if any(each.shape.frames > 1 for each in drawn):
        require_video_writer()
    return [planned_image(settings, family, each) for each in drawn]


def planned_image(settings: Settings, family: ModelFamily, drawn: DrawnPrompt) -> PlannedImage:
    validation, prompt = settings.validation, drawn.prompt
    seed = settings.training.seed if validation.validation_seed is None else validation.validation_seed
    assert drawn.positive is not None and drawn.negative is not None, "prompts are encoded before"
    sampling = SamplingParams(
        shape=drawn.shape,
        steps=prompt.num_inference_steps or validation.validation_num_inference_steps,
        guidance=validation.validation_guidance if prompt.guidance is None else prompt.guidance,
        seed=seed + drawn.number if prompt.seed is None else prompt.seed,
        fps=validation.framerate or family.frame_rate,
        references=drawn.references,
    )
    return PlannedImage(
        drawn.name,
        drawn.number,
        prompt.prompt,
        drawn.negative_prompt,
        drawn.positive,
        drawn.negative,
        sampling,
    )
