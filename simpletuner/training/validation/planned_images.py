"""Which images and clips each round of validation generates, from prompts and from pairs of the datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from PIL.Image import Image

from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.models.family.base import ModelFamily, SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.preparation.prepare import Plan, Prepared, samples_by_shape
from simpletuner.settings import Settings
from simpletuner.settings.values.shape import Shape, parse_shapes
from simpletuner.training.images.clip_files import require_video_writer
from simpletuner.training.images.image_files import ImageInfo
from simpletuner.training.validation.references import chosen_pairs, read_references, references_of


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


@dataclass(frozen=True)
class Drawn:
    """What is drawn from one prompt, in each of `shapes`."""

    prompt: ValidationPrompt
    shapes: Sequence[Shape]
    positive: Conditioning
    references: Callable[[Shape], tuple[Image, ...]] = lambda shape: ()


def plan_images(settings: Settings, family: ModelFamily, prepared: Prepared) -> list[PlannedImage]:
    """Return the images and clips of each round. Each prompt has its own seed, whichever rank samples it.

    Raises EnvironmentNotReady for clips where nothing can write them, and what reading references raises.
    """
    validation, read = settings.validation, cache(prepared.prompts.read)  # one negative prompt serves many images
    seed = settings.training.seed if validation.validation_seed is None else validation.validation_seed
    planned: list[PlannedImage] = []
    drawn = [*drawn_from_prompts(settings, prepared), *drawn_from_pairs(settings, prepared)]
    for number, each in enumerate(drawn):
        if any(shape.frames > 1 for shape in each.shapes):
            require_video_writer()
        given = each.prompt.negative_prompt
        negative = validation.validation_negative_prompt if given is None else given
        for shape in each.shapes:
            guidance = each.prompt.guidance
            sampling = SamplingParams(
                shape=shape,
                steps=each.prompt.num_inference_steps or validation.validation_num_inference_steps,
                guidance=validation.validation_guidance if guidance is None else guidance,
                seed=seed + number if each.prompt.seed is None else each.prompt.seed,
                fps=validation.framerate or family.frame_rate,
                references=each.references(shape),
            )
            planned.append(
                PlannedImage(
                    name=f"{number:02d}" + (f"-{shape}" if len(each.shapes) > 1 else ""),
                    number=number,
                    prompt=each.prompt.prompt,
                    negative_prompt=negative,
                    positive=each.positive,
                    negative=read(negative) if negative else prepared.reader.no_caption,
                    sampling=sampling,
                )
            )
    return planned


def drawn_from_prompts(settings: Settings, prepared: Prepared) -> Iterator[Drawn]:
    """Yield prompts with their references: files, or those of a pair where the run trains on pairs."""
    plan, multiple = prepared.plan, settings.data.aspect_bucket_alignment
    pair = next(iter(chosen_pairs(plan, 1)), None)
    is_loose = any(each.conditioning_type == "reference_loose" for own in plan.datasets for each in own.conditioning)
    for prompt in prepared.validation:
        shapes, positive = sampled_shapes(settings, prompt, plan), prepared.prompts.read(prompt.prompt)
        if prompt.images:
            read = partial(read_references, prompt.images, is_loose=is_loose, multiple=multiple)
            yield Drawn(prompt, shapes, positive, read)
        elif pair is not None:
            is_given = prompt.resolution or settings.validation.validation_resolution
            own = shapes if is_given else [pair.geometry.target]
            yield Drawn(prompt, own, positive, partial(same_references, references_of(pair)))
        else:
            yield Drawn(prompt, shapes, positive)


def drawn_from_pairs(settings: Settings, prepared: Prepared) -> Iterator[Drawn]:
    """Yield pairs with their own captions."""
    for sample in chosen_pairs(prepared.plan, settings.validation.validation_pairs):
        caption = sample.captions[0]
        positive, references = prepared.reader.text(sample, caption), partial(same_references, references_of(sample))
        yield Drawn(ValidationPrompt(prompt=caption), [sample.geometry.target], positive, references)


def same_references(references: tuple[Image, ...], shape: Shape) -> tuple[Image, ...]:
    return references


def sampled_shapes(settings: Settings, prompt: ValidationPrompt, plan: Plan) -> list[Shape]:
    """Return the shapes of a prompt, of validation_resolution, or the square of the training resolution.

    Where no frames are given, they are as many as in the longest clip that is trained on.
    """
    validation = settings.validation
    frames = validation.validation_num_video_frames or max(shape.target.frames for shape in samples_by_shape(plan))
    shapes = parse_shapes(prompt.resolution or validation.validation_resolution) or [settings.data.square]
    return [shape if shape.frames > 1 else shape._replace(frames=frames) for shape in shapes]
