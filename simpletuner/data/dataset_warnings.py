"""What users should know about the images that were found: one line per kind, with a count and an example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from simpletuner.data.datasets import ImageDataset
from simpletuner.data.discovery import Discovery, Sample, count_noun
from simpletuner.data.geometry import target_area_px

MIN_ENLARGEMENT = 1.1
"""Enlarging up to this factor is what rounding to buckets does, and is not mentioned."""

EXTREME_ASPECT = 4.0

LONG_CAPTION_LETTERS = 4000
"""More than any text encoder reads (1,024 tokens at most). Shorter captions may be cut as well, at 77 tokens by CLIP;
they are not counted, since all captions would have to be tokenized at every start."""

MAX_AREA_RATIO = 1.5
"""By which factor a bucket's area may differ from the resolution before that is mentioned."""

MAX_SUFFIXES = 8


def dataset_warnings(found: Discovery, datasets: Sequence[ImageDataset], alignment_px: int) -> Iterator[str]:
    """Yield one sentence for each thing that happens to images without being asked for."""
    yield from warn_not_read(found)
    if found.animated:
        images = count_noun(len(found.animated), "image")
        yield f"{images} with several frames: the first is used ({found.animated[0]})"
    yield from warn_enlarged(found.samples)
    yield from warn_extreme_aspect(found.samples)
    for dataset in datasets:
        own = [sample for sample in found.samples if sample.dataset == dataset.id]
        yield from warn_other_area(dataset, own, alignment_px)
    yield from warn_long_captions(found.samples)


def warn_not_read(found: Discovery) -> Iterator[str]:
    if found.not_read:
        kinds = Counter("." + name.rpartition(".")[2].lower() for name in found.not_read).most_common()
        named = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds[:MAX_SUFFIXES])
        more = ", and others" if len(kinds) > MAX_SUFFIXES else ""
        yield (
            f"{count_noun(len(found.not_read), 'file')} not read: {named}{more}, such as {found.not_read[0]}; "
            "only JPEG, PNG and WebP are read: convert them"
        )


def warn_enlarged(samples: Sequence[Sample]) -> Iterator[str]:
    enlarged = [(factor, each) for each in samples if (factor := enlargement(each)) > MIN_ENLARGEMENT]
    if enlarged:
        factor, worst = max(enlarged, key=lambda pair: pair[0])
        (width, height), (to_width, to_height) = worst.geometry.original, worst.geometry.resized
        yield (
            f"{count_noun(len(enlarged), 'image')} of {len(samples):,} enlarged, up to {factor:.1f} times: {worst.id} "
            f"from {width}x{height} to {to_width}x{to_height} px; minimum_image_size leaves small ones out"
        )


def enlargement(sample: Sample) -> float:
    """Return the factor by which an image is enlarged."""
    return max(to / side for to, side in zip(sample.geometry.resized, sample.geometry.original, strict=True))


def warn_extreme_aspect(samples: Sequence[Sample]) -> Iterator[str]:
    extreme = [each for each in samples if max(each.geometry.original) > EXTREME_ASPECT * min(each.geometry.original)]
    if extreme:
        worst = max(extreme, key=lambda each: max(each.geometry.original) / min(each.geometry.original))
        (width, height), (to_width, to_height) = worst.geometry.original, worst.geometry.target
        yield (
            f"{count_noun(len(extreme), 'image')} with one side more than {EXTREME_ASPECT:g} times the other: "
            f"{worst.id} ({width}x{height} px) is trained at {to_width}x{to_height}; minimum_aspect_ratio and "
            "maximum_aspect_ratio leave such images out"
        )


def warn_other_area(dataset: ImageDataset, samples: Sequence[Sample], alignment_px: int) -> Iterator[str]:
    """Say where aspect_bucket_alignment does not allow the resolution that was asked for."""

    def area_ratio(sample: Sample) -> float:
        (width, height), (original_width, original_height) = sample.geometry.target, sample.geometry.original
        square = dataset.crop and dataset.crop_aspect == "square"
        area = target_area_px(dataset, 1.0 if square else original_width / original_height)
        return max(width * height / area, area / (width * height))

    other = [each for each in samples if area_ratio(each) > MAX_AREA_RATIO]
    if other:
        width, height = other[0].geometry.target
        yield (
            f"{count_noun(len(other), 'image')} of dataset `{dataset.id}` far from resolution={dataset.resolution:g} "
            f"({dataset.resolution_type}): {other[0].id} is trained at {width}x{height}, since sides are multiples of "
            f"aspect_bucket_alignment={alignment_px}"
        )


def warn_long_captions(samples: Sequence[Sample]) -> Iterator[str]:
    long = [each for each in samples if any(len(caption) > LONG_CAPTION_LETTERS for caption in each.captions)]
    if long:
        worst = max(long, key=lambda each: max(map(len, each.captions)))
        yield (
            f"{count_noun(len(long), 'image')} with a caption of more than {LONG_CAPTION_LETTERS:,} letters: no text "
            f"encoder reads it to its end ({worst.id}: {max(map(len, worst.captions)):,} letters)"
        )
