"""Geometry of images and videos: aspect buckets, resized sizes and crops.

Arrays of sizes are (images, 2) int64, width and height in px. What both sides are reduced to is computed from
two columns, `np.maximum(*sizes.T)`: a reduction along so short an axis takes ten times as long.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.videos import Clip, clip_of
from simpletuner.settings.values.shape import Shape

# Largest relative distance of a bucket's area from the target. At 1024 px this halves what is cropped on
# average (from 2.5 to 1.2 %); 12 % would gain nothing there and spread images over more buckets.
AREA_TOLERANCE = 0.1

# Of two aspects of images, as a logarithm.
MORE_THAN_ANY_RATIO = 1000.0


@dataclass(frozen=True, slots=True)
class Geometry:
    """Transform of an image, or of each frame of a clip: resize to `resized`, crop `target`."""

    original: Shape
    resized: Shape
    crop_left_top: tuple[int, int]
    target: Shape
    clip: Clip | None = None
    """Clip that is cut from a video."""


def target_areas(dataset: ImageDataset, aspects: np.ndarray) -> np.ndarray:
    """Return the areas (px) that images of these aspects (width / height) are brought to."""
    if dataset.resolution_type == "area":
        return np.full(len(aspects), dataset.resolution * 1_000_000)
    if dataset.resolution_type == "pixel":
        return dataset.resolution**2 * np.maximum(aspects, 1 / aspects)
    return np.full(len(aspects), dataset.resolution**2)


def shapes_of(dataset: ImageDataset, originals: np.ndarray) -> np.ndarray:
    """Sizes that decide the buckets by their aspects: of the images, or squares."""
    return np.ones_like(originals) if dataset.crop and dataset.crop_aspect == "square" else originals


def bucket_sizes(
    dataset: ImageDataset, originals: np.ndarray, alignment_px: int, choices: np.ndarray | None = None
) -> np.ndarray:
    """Bucket of each image; `choices` (images,) are places in `dataset.aspects` for crop_aspect random."""
    if not (dataset.crop and dataset.crop_aspect in ("closest", "random")):
        shapes = shapes_of(dataset, originals)
        return sizes_of_shapes(dataset, shapes, alignment_px, exact_squares=shapes is not originals)
    shapes = np.stack([np.array(dataset.aspects), np.ones(len(dataset.aspects))], axis=1)
    targets = sizes_of_shapes(dataset, shapes, alignment_px, exact_squares=True)
    return targets[closest_aspects(dataset, originals, targets) if choices is None else choices]


def sizes_of_shapes(dataset: ImageDataset, shapes: np.ndarray, alignment_px: int, exact_squares: bool) -> np.ndarray:
    """Return, of the sizes around the target area with the aspect of each shape, the one that crops least.

    Both sides are multiples of the alignment. Where none of them is near the area, each side is rounded by
    itself.
    """
    if dataset.aspect_bucket_sizes == "nearest":
        return nearest_sizes(dataset, shapes, alignment_px)
    area = target_areas(dataset, shapes[:, 0] / shapes[:, 1])
    ideal = np.sqrt(np.stack([area * shapes[:, 0] / shapes[:, 1], area * shapes[:, 1] / shapes[:, 0]], axis=1))
    best = round_to_multiples(ideal, alignment_px)
    below = np.maximum(1, np.floor(ideal / alignment_px).astype(np.int64)) * alignment_px
    least = np.full((len(shapes), 2), np.inf)  # what is cropped, and the distance from the ideal size
    must_be_square = (shapes[:, 0] == shapes[:, 1]) & exact_squares
    for steps in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sizes = below + np.array(steps) * alignment_px
        share, distance = cropped_shares(shapes, sizes), np.add(*np.abs(sizes - ideal).T)
        is_near = np.abs(sizes[:, 0] * sizes[:, 1] / area - 1) <= AREA_TOLERANCE
        is_near &= (sizes[:, 0] == sizes[:, 1]) | ~must_be_square
        better = is_near & ((share < least[:, 0]) | ((share == least[:, 0]) & (distance < least[:, 1])))
        best[better], least[better] = sizes[better], np.stack([share, distance], axis=1)[better]
    return best


def nearest_sizes(dataset: ImageDataset, shapes: np.ndarray, alignment_px: int) -> np.ndarray:
    """Return the sizes with the aspects of shapes, to two decimals, each side rounded by itself.

    Each area is a square with an edge that is a multiple of the alignment; an edge in px counts as it is.
    """
    aspects = np.maximum(np.round(shapes[:, 0] / shapes[:, 1], 2), 0.01)  # above 100:1 nothing is left
    if dataset.resolution_type == "pixel":
        edges = np.full(len(aspects), float(int(dataset.resolution)))
        ideal = np.stack([edges * np.maximum(aspects, 1), edges * np.maximum(1 / aspects, 1)], axis=1).astype(np.int64)
    else:
        edges = round_to_multiples(np.sqrt(target_areas(dataset, aspects)).astype(np.int64), alignment_px)
        ideal = np.stack([edges * np.sqrt(aspects), edges / np.sqrt(aspects)], axis=1)
    return np.maximum(1, np.round(ideal / alignment_px).astype(np.int64)) * alignment_px


def closest_aspects(dataset: ImageDataset, originals: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Nearest of the dataset's aspect ratios, per image.

    Those whose bucket would enlarge an image too much are only chosen where all of them would.
    """
    aspects = originals[:, 0] / originals[:, 1]
    nearest, least = np.zeros(len(originals), np.int64), np.full(len(originals), np.inf)
    for number, aspect in enumerate(dataset.aspects):
        distance = np.abs(np.log(aspects / aspect))
        distance[~is_enlarged_within(dataset, originals, targets[number])] += MORE_THAN_ANY_RATIO
        closer = distance < least
        nearest[closer], least[closer] = number, distance[closer]
    return nearest


def cropped_shares(shapes: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the shares of images that are cropped when they cover their targets."""
    products = shapes * targets[:, ::-1]
    return 1 - np.minimum(*products.T) / np.maximum(*products.T)


def round_to_multiples(sides_px: np.ndarray, alignment_px: int) -> np.ndarray:
    # floor(x + 0.5), since `round` would send 1.5 and 2.5 to the same multiple.
    return np.maximum(1, np.floor(sides_px / alignment_px + 0.5).astype(np.int64)) * alignment_px


def resized_sizes(dataset: ImageDataset, originals: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Sizes with the aspects of images that cover their buckets: the smallest, or what is cropped from."""
    scale = np.maximum(*(targets / originals).T)[:, None]
    # At least the bucket: rounding must leave no side short of it.
    return downsampled(dataset, originals, np.maximum(targets, np.rint(originals * scale).astype(np.int64)))


def compute_geometry(
    dataset: ImageDataset, sample_id: str, original: Shape, resized: Shape, target: Shape, seed: int, stride: float = 1
) -> Geometry:
    """Resizing and crop of one image or video for its bucket; `stride` is the distance between frames."""
    room = (resized.width - target.width, resized.height - target.height)
    video = dataset.clips
    clip = clip_of(video, sample_id, original.frames, target.frames, stride, seed) if video else None
    return Geometry(original, resized, crop_position(dataset, sample_id, room, seed), target, clip)


def crop_position(dataset: ImageDataset, sample_id: str, room: tuple[int, int], seed: int) -> tuple[int, int]:
    """Left and top of the crop, in px, given the room to move in each direction."""
    if not dataset.crop or dataset.crop_style == "center":
        return room[0] // 2, room[1] // 2
    if dataset.crop_style == "corner":
        return 0, 0
    # Not of the step: latents are cached, so the crop of a sample must stay the same.
    digest = hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=16).digest()
    left, top = int.from_bytes(digest[:8]), int.from_bytes(digest[8:])
    # Of 64 bits the modulo's bias is below 2^-50 for any image.
    return left % (room[0] + 1), top % (room[1] + 1)


def are_within_limits(dataset: ImageDataset, originals: np.ndarray) -> np.ndarray:
    """Mask of images within the dataset's limits of size and aspect."""
    aspects = originals[:, 0] / originals[:, 1]
    within = np.ones(len(originals), bool)
    if dataset.minimum_aspect_ratio is not None:
        within &= aspects >= dataset.minimum_aspect_ratio
    if dataset.maximum_aspect_ratio is not None:
        within &= aspects <= dataset.maximum_aspect_ratio
    if dataset.minimum_image_size is not None:
        within &= in_resolution_units(dataset, originals) >= dataset.minimum_image_size
    return within


def is_enlarged_within(dataset: ImageDataset, originals: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Mask of images that cover their targets without more enlargement than the dataset allows."""
    allowed = dataset.max_upscale_threshold
    if allowed is None:
        return np.ones(len(originals), bool)
    return np.maximum(*(targets / originals).T) <= 1 + allowed


def in_resolution_units(dataset: ImageDataset, sizes: np.ndarray) -> np.ndarray:
    if dataset.resolution_type == "pixel":
        return np.minimum(*sizes.T)
    area = sizes[:, 0] * sizes[:, 1]
    return area / 1_000_000 if dataset.resolution_type == "area" else np.sqrt(area)


def downsampled(dataset: ImageDataset, originals: np.ndarray, resized: np.ndarray) -> np.ndarray:
    """Return the sizes from which images are cropped: those above the maximum keep the detail of the target
    size.

    Not below `resized`, which covers the bucket.
    """
    if not dataset.crop or dataset.maximum_image_size is None or dataset.target_downsample_size is None:
        return resized
    size = in_resolution_units(dataset, originals)
    scale = dataset.target_downsample_size / size
    scale = np.sqrt(scale) if dataset.resolution_type == "area" else scale
    target = np.rint(originals * scale[:, None]).astype(np.int64)
    return np.where((size > dataset.maximum_image_size)[:, None], np.maximum(resized, target), resized)
