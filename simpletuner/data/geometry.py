"""From an image's size to its aspect bucket, its resized size and its crop; all sizes are (width, height) in px."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from simpletuner.data.batch_sampler import DATA_VERSION
from simpletuner.data.datasets import ImageDataset

Size = tuple[int, int]

AREA_TOLERANCE = 0.1
"""How far a bucket's area may be from the target. At 1024 px this halves what is cropped (from 2.5 to 1.2 % on
average); 12 % would gain nothing there and spread images over more buckets."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What happens to one image: resize to `resized`, crop `target` at `crop_left_top`."""

    original: Size
    resized: Size
    crop_left_top: Size
    target: Size


def target_area_px(dataset: ImageDataset, aspect: float) -> float:
    """Return the area that an image of this aspect (width / height) is brought to."""
    if dataset.resolution_type == "area":
        return dataset.resolution * 1_000_000
    if dataset.resolution_type == "pixel":
        return dataset.resolution**2 * max(aspect, 1 / aspect)
    return dataset.resolution**2


def bucket_size(dataset: ImageDataset, original: Size, alignment_px: int, version: int = DATA_VERSION) -> Size:
    """Return the bucket: of the sizes around the target area with the image's aspect, the one that crops least.

    Both sides are multiples of the alignment. Where none of them is near the area, each side is rounded by itself, as
    version 1 always did.
    """
    square = dataset.crop and dataset.crop_aspect == "square"
    shape = (1, 1) if square else original
    area = target_area_px(dataset, shape[0] / shape[1])
    width, height = math.sqrt(area * shape[0] / shape[1]), math.sqrt(area * shape[1] / shape[0])
    near = (
        []
        if version == 1
        else [
            (w, h)
            for w in neighbouring_multiples(width, alignment_px)
            for h in neighbouring_multiples(height, alignment_px)
            if abs(w * h / area - 1) <= AREA_TOLERANCE and (w == h or not square)
        ]
    )
    rounded = (round_to_multiple(width, alignment_px), round_to_multiple(height, alignment_px))
    return min(
        near, key=lambda size: (cropped_share(shape, size), size_distance(size, (width, height))), default=rounded
    )


def cropped_share(shape: Size, target: Size) -> float:
    """Return the share of an image that is cropped when it covers the target."""
    one, two = shape[0] * target[1], shape[1] * target[0]
    return 1 - min(one, two) / max(one, two)


def size_distance(size: Size, ideal: tuple[float, float]) -> float:
    return abs(size[0] - ideal[0]) + abs(size[1] - ideal[1])


def neighbouring_multiples(side_px: float, alignment_px: int) -> list[int]:
    """Return the multiples of the alignment below and above a length, at least one alignment each."""
    below = max(1, math.floor(side_px / alignment_px))
    return [below * alignment_px, (below + 1) * alignment_px]


def round_to_multiple(side_px: float, alignment_px: int) -> int:
    # floor(x + 0.5), since `round` would send 1.5 and 2.5 to the same multiple.
    return max(1, math.floor(side_px / alignment_px + 0.5)) * alignment_px


def compute_geometry(
    dataset: ImageDataset, sample_id: str, original: Size, alignment_px: int, seed: int, version: int = DATA_VERSION
) -> Geometry:
    """Return how one image is resized and cropped."""
    target = bucket_size(dataset, original, alignment_px, version)
    scale = max(target[0] / original[0], target[1] / original[1])
    resized = (max(target[0], round(original[0] * scale)), max(target[1], round(original[1] * scale)))
    room = (resized[0] - target[0], resized[1] - target[1])
    return Geometry(original, resized, crop_position(dataset, sample_id, room, seed), target)


def crop_position(dataset: ImageDataset, sample_id: str, room: Size, seed: int) -> Size:
    """Return where the crop begins, given how far it can move."""
    if not (dataset.crop and dataset.crop_style == "random"):
        return room[0] // 2, room[1] // 2
    # Not of the step: latents are cached, so the crop of a sample must stay the same.
    digest = hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=16).digest()
    left, top = int.from_bytes(digest[:8]), int.from_bytes(digest[8:])
    return left % (room[0] + 1), top % (room[1] + 1)


def is_within_limits(dataset: ImageDataset, original: Size) -> bool:
    """Whether an image is within the dataset's limits of size and aspect."""
    aspect = original[0] / original[1]
    if dataset.minimum_aspect_ratio is not None and aspect < dataset.minimum_aspect_ratio:
        return False
    if dataset.maximum_aspect_ratio is not None and aspect > dataset.maximum_aspect_ratio:
        return False
    return (
        dataset.minimum_image_size is None or size_in_resolution_units(dataset, original) >= dataset.minimum_image_size
    )


def size_in_resolution_units(dataset: ImageDataset, original: Size) -> float:
    area = original[0] * original[1]
    return {"area": area / 1_000_000, "pixel": min(original), "pixel_area": math.sqrt(area)}[dataset.resolution_type]
