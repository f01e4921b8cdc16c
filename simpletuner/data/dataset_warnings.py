"""What users should know about the pictures that were found: one line for each kind, with a count and an example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from simpletuner.data.datasets import ImageDataset
from simpletuner.data.discovery import Found, Sample, counted
from simpletuner.data.geometry import target_area_px

ENLARGED = 1.1
"""Enlarging up to this factor is what rounding to buckets does, and is not mentioned."""

LONG_SIDES = 4.0
"""Above this ratio of its sides a picture is named as extreme."""

LONG_LETTERS = 4000
"""More than any text encoder reads (1,024 tokens at most); shorter captions may be cut by some."""

OTHER_AREA = 1.5
"""By which factor a bucket's area may differ from the one asked for before that is mentioned."""

SUFFIXES_NAMED = 8


def dataset_warnings(found: Found, datasets: Sequence[ImageDataset], alignment_px: int) -> Iterator[str]:
    """Yield one sentence for each thing that happens to pictures without being asked for."""
    yield from not_read(found)
    if found.animated:
        yield f"{counted(len(found.animated), 'picture')} with several frames: the first is used ({found.animated[0]})"
    yield from enlarged(found.samples)
    yield from extreme(found.samples)
    for dataset in datasets:
        yield from other_area(dataset, [each for each in found.samples if each.dataset == dataset.id], alignment_px)
    yield from long_captions(found.samples)


def not_read(found: Found) -> Iterator[str]:
    """Say which files are passed over."""
    if found.not_read:
        kinds = Counter(path.suffix.lower() for path in found.not_read).most_common()
        named = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds[:SUFFIXES_NAMED])
        more = ", and others" if len(kinds) > SUFFIXES_NAMED else ""
        yield (
            f"{counted(len(found.not_read), 'file')} not read: {named}{more}, such as {found.not_read[0]}; "
            "JPEG, PNG and WebP are: convert them"
        )


def enlarged(samples: Sequence[Sample]) -> Iterator[str]:
    """Say how many pictures are smaller than what is trained on."""
    grown = [(factor, each) for each in samples if (factor := enlargement(each)) > ENLARGED]
    if grown:
        factor, most = max(grown, key=lambda pair: pair[0])
        (width, height), (to_width, to_height) = most.geometry.original, most.geometry.resized
        yield (
            f"{counted(len(grown), 'picture')} of {len(samples):,} enlarged, up to {factor:.1f} times: {most.id} from "
            f"{width}x{height} to {to_width}x{to_height} px; minimum_image_size leaves small ones out"
        )


def enlargement(sample: Sample) -> float:
    """Return by which factor a picture is enlarged."""
    return max(to / side for to, side in zip(sample.geometry.resized, sample.geometry.original, strict=True))


def extreme(samples: Sequence[Sample]) -> Iterator[str]:
    """Say how many pictures are very long or very high."""
    long = [each for each in samples if max(each.geometry.original) > LONG_SIDES * min(each.geometry.original)]
    if long:
        most = max(long, key=lambda each: max(each.geometry.original) / min(each.geometry.original))
        (width, height), (to_width, to_height) = most.geometry.original, most.geometry.target
        yield (
            f"{counted(len(long), 'picture')} with one side more than {LONG_SIDES:g} times the other: {most.id} "
            f"({width}x{height} px) is trained at {to_width}x{to_height}; minimum_aspect_ratio and "
            "maximum_aspect_ratio leave such out"
        )


def other_area(dataset: ImageDataset, samples: Sequence[Sample], alignment_px: int) -> Iterator[str]:
    """Say where aspect_bucket_alignment does not allow the resolution that was asked for."""

    def factor(sample: Sample) -> float:
        (width, height), (original_width, original_height) = sample.geometry.target, sample.geometry.original
        square = dataset.crop and dataset.crop_aspect == "square"
        area = target_area_px(dataset, 1.0 if square else original_width / original_height)
        return max(width * height / area, area / (width * height))

    other = [each for each in samples if factor(each) > OTHER_AREA]
    if other:
        width, height = other[0].geometry.target
        yield (
            f"{counted(len(other), 'picture')} of dataset `{dataset.id}` far from resolution={dataset.resolution:g} "
            f"({dataset.resolution_type}): {other[0].id} is trained at {width}x{height}, since sides are multiples of "
            f"aspect_bucket_alignment={alignment_px}"
        )


def long_captions(samples: Sequence[Sample]) -> Iterator[str]:
    """Say how many captions no text encoder reads to their end."""
    long = [each for each in samples if any(len(caption) > LONG_LETTERS for caption in each.captions)]
    if long:
        most = max(long, key=lambda each: max(map(len, each.captions)))
        yield (
            f"{counted(len(long), 'picture')} with a caption of more than {LONG_LETTERS:,} letters: no text encoder "
            f"reads it to its end ({most.id}: {max(map(len, most.captions)):,} letters)"
        )
