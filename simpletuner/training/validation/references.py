"""The references of validation images: those of pairs, and files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from simpletuner.caches.latents import decode_image, undecodable
from simpletuner.data.images.images import DECODE_ERRORS, read_rgb
from simpletuner.data.samples.samples import Sample
from simpletuner.errors import SettingsError
from simpletuner.preparation.prepare import Plan
from simpletuner.settings.values.shape import Shape
from simpletuner.training.images.image_files import to_image


def chosen_pairs(plan: Plan, count: int) -> list[Sample]:
    """Return samples that have references: held-out ones, and where there are none, the first that are trained on."""
    held_out = [sample for index in plan.held_out.tolist()[:count] if (sample := plan.samples[index]).references]
    if held_out:
        return held_out
    paired = [part for part in plan.samples.parts if part.references]
    return [part[index] for part in paired for index in range(min(count, len(part)))][:count]


def references_of(sample: Sample) -> tuple[Image.Image, ...]:
    """Return the references of a sample as training crops them. Raises DataError for one that cannot be decoded."""
    images: list[Image.Image] = []
    for reference in sample.references:
        pixels = decode_image(reference)
        if isinstance(pixels, str):
            raise undecodable(reference, pixels, "remove it, or run the same command again")
        images.append(to_image(pixels[None]))
    return tuple(images)


def read_references(paths: Sequence[Path], shape: Shape, is_loose: bool, multiple: int) -> tuple[Image.Image, ...]:
    """Return files as references: cropped to a shape, or of its area and their own aspect."""
    return tuple(read_reference(path, shape, is_loose, multiple) for path in paths)


def read_reference(path: Path, shape: Shape, is_loose: bool, multiple: int) -> Image.Image:
    try:
        with path.open("rb") as file:
            image = read_rgb(file, shape.size)
    except DECODE_ERRORS as error:
        raise SettingsError(f"{path} cannot be decoded: {error}", "name an image that opens elsewhere") from None
    width, height = shape.size
    if is_loose:
        scale = math.sqrt(shape.area / (image.width * image.height)) / multiple
        width, height = (max(1, round(side * scale)) * multiple for side in image.size)
    scale = max(width / image.width, height / image.height)
    size = [max(least, round(side * scale)) for side, least in zip(image.size, (width, height), strict=True)]
    resized = image.resize((size[0], size[1]), Image.Resampling.LANCZOS, reducing_gap=3.0)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return resized.crop((left, top, left + width, top + height))
