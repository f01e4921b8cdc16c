"""Prompts of each round of validation, with shapes and references, from files and from pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

from PIL import Image

from simpletuner.data.config.validation_prompts import ValidationPrompt
from simpletuner.data.images.images import DECODE_ERRORS, cropped, read_rgb
from simpletuner.data.samples.samples import reference_images
from simpletuner.errors import SettingsError
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.preparation.plan import Plan, samples_by_shape
from simpletuner.settings import Settings
from simpletuner.settings.values.shape import Shape, parse_shapes
from simpletuner.system.files.regular_files import open_regular

Images = tuple[Image.Image, ...]


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt to sample in one shape; `number` counts prompts, `name` is unique."""

    number: int
    name: str
    prompt: ValidationPrompt
    negative_prompt: str
    shape: Shape
    references: Images = ()
    positive: Conditioning = field(default_factory=dict)
    negative: Conditioning = field(default_factory=dict)
    """Embeddings of both prompts, without a batch axis, once they are encoded."""

    def encoded(self, positive: Conditioning, negative: Conditioning) -> SampledPrompt:
        return replace(self, positive=positive, negative=negative)


def sampled_prompts(settings: Settings, plan: Plan, prompts: Sequence[ValidationPrompt]) -> list[SampledPrompt]:
    """Return the prompts of validation with their shapes and references, without embeddings.

    Raises SettingsError for a reference that cannot be decoded.
    """
    sampled: list[SampledPrompt] = []
    each = (*of_prompts(settings, plan, prompts), *of_pairs(settings, plan))
    for number, (prompt, shapes, references) in enumerate(each):
        given = prompt.negative_prompt
        negative = settings.validation.validation_negative_prompt if given is None else given
        for shape in shapes:
            name = f"{number:02d}" + (f"-{shape}" if len(shapes) > 1 else "")
            sampled.append(SampledPrompt(number, name, prompt, negative, shape, references(shape)))
    return sampled


PromptShapes = tuple[ValidationPrompt, Sequence[Shape], Callable[[Shape], Images]]


def of_prompts(settings: Settings, plan: Plan, prompts: Sequence[ValidationPrompt]) -> Iterator[PromptShapes]:
    """Yield prompts with their references: files, or those of a pair where the run trains on pairs."""
    pair = next(pairs_of(plan), None)
    is_loose = any(each.conditioning_type == "reference_loose" for own in plan.datasets for each in own.conditioning)
    multiple = settings.data.aspect_bucket_alignment if is_loose else None
    for prompt in prompts:
        shapes = sampled_shapes(settings, prompt, plan)
        if prompt.images:
            yield prompt, shapes, partial(read_references, prompt.images, multiple)
        elif pair is not None:
            is_given = prompt.resolution or settings.validation.validation_resolution
            yield prompt, shapes if is_given else [pair[1]], partial(same_for_any_shape, pair[2])
        else:
            yield prompt, shapes, partial(same_for_any_shape, ())


def of_pairs(settings: Settings, plan: Plan) -> Iterator[PromptShapes]:
    """Yield as many pairs as validation_pairs says, with their own captions."""
    count = settings.validation.validation_pairs
    for caption, shape, references in islice(pairs_of(plan) if count else (), count):
        yield ValidationPrompt(prompt=caption), [shape], partial(same_for_any_shape, references)


def same_for_any_shape(references: Images, shape: Shape) -> Images:
    return references


def pairs_of(plan: Plan) -> Iterator[tuple[str, Shape, Images]]:
    """Yield caption, shape and references of samples that have some: held-out ones, or the others.

    Those that cannot be decoded are not among them.
    """
    if not any(len(dataset.encoded) > 1 or dataset.is_i2v for dataset in plan.datasets):
        return
    held_out = [sample for index in plan.held_out.tolist() if (sample := plan.samples[index]).conditioning_samples]
    trained = (
        sample
        for part in plan.samples.parts
        for index in range(len(part))
        if (sample := part[index]).conditioning_samples
    )
    for sample in held_out or trained:
        try:
            references = reference_images(sample)
        except DECODE_ERRORS:
            continue
        yield sample.captions[0], sample.geometry.target, references


def read_references(paths: Sequence[Path], multiple: int | None, shape: Shape) -> Images:
    return tuple(read_reference(path, shape, multiple) for path in paths)


def read_reference(path: Path, shape: Shape, multiple: int | None) -> Image.Image:
    """File cropped to a shape, or of its area and the file's own aspect, with sides of this multiple.

    Raises SettingsError for what cannot be decoded.
    """
    try:
        with open_regular(path) as file:
            image = read_rgb(file, shape.size)
    except DECODE_ERRORS as error:
        raise SettingsError(f"{path} cannot be decoded: {error}", "name an image that opens elsewhere") from None
    width, height = shape.size
    if multiple is not None:
        scale = math.sqrt(shape.area / (image.width * image.height)) / multiple
        width, height = (max(1, round(side * scale)) * multiple for side in image.size)
    scale = max(width / image.width, height / image.height)
    resized = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    return cropped(image, resized, ((resized[0] - width) // 2, (resized[1] - height) // 2), (width, height))


def sampled_shapes(settings: Settings, prompt: ValidationPrompt, plan: Plan) -> list[Shape]:
    """Return the shapes of a prompt, of validation_resolution, or the square of the training resolution.

    Where no frames are given, they are as many as in the longest clip that is trained on.
    """
    validation = settings.validation
    frames = validation.validation_num_video_frames or max(shape.target.frames for shape in samples_by_shape(plan))
    shapes = parse_shapes(prompt.resolution or validation.validation_resolution) or [settings.data.square]
    return [shape if shape.frames > 1 else shape._replace(frames=frames) for shape in shapes]
