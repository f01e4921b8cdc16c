"""Warnings about the images that were found: one line per kind, with a count and an example."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from simpletuner.data.images.geometry import shapes_of, target_areas
from simpletuner.data.images.image_formats import BY_PLUGIN, INSTALL
from simpletuner.data.samples.discovery import Discovery
from simpletuner.data.samples.file_remarks import captions_found, file_remarks
from simpletuner.data.samples.formats_read import formats_read, frames_hint
from simpletuner.data.samples.samples import DatasetSamples, Sample, Samples
from simpletuner.data.samples.sizes import Sizes
from simpletuner.data.scan.captions import captions_of
from simpletuner.data.scan.scan import Scan
from simpletuner.data.storage.storage import CAPTION_SUFFIX
from simpletuner.system.numbers import count_noun

# Enlarging up to this factor is what rounding to buckets does, and is not mentioned.
MIN_ENLARGEMENT = 1.1

EXTREME_ASPECT = 4.0

# More than any text encoder reads (1,024 tokens at most). Shorter captions may be cut as well, at 77 tokens
# by CLIP; they are not counted, since all captions would have to be tokenized at every start.
LONG_CAPTION_LETTERS = 4000

# By which factor a bucket's area may differ from the resolution before that is mentioned.
MAX_AREA_RATIO = 1.5

MAX_SUFFIXES = 8


def dataset_warnings(found: Discovery, alignment_px: int) -> Iterator[str]:
    """Yield one sentence for each thing that happens to images without being asked for."""
    yield from warn_not_read(found)
    yield from (remark for others in found.others for remark in others.table_remarks)
    yield from (sentence for scan in found.scans for _, _, sentence in file_remarks(scan))
    for scan in found.scans:
        if found.uncaptioned[scan.dataset.id]:
            yield from (f"dataset `{scan.dataset.id}`: {said}" for said in captions_found(scan.others))
    if found.animated:
        images = count_noun(len(found.animated), "image")
        yield f"{images} with several frames: the first is used ({found.animated[0]})"
    for part in found.samples.parts:
        if remark := found.caption_lines[part.dataset.id].remark(part.dataset):
            yield remark
    yield from filter(None, map(unused_captions, found.scans))
    yield from warn_enlarged(found.samples)
    yield from warn_extreme_aspect(found.samples)
    for part in found.samples.parts:
        yield from warn_other_area(part, alignment_px)
    yield from warn_long_captions(found.samples)


def unused_captions(scan: Scan) -> str:
    """Return a sentence about the caption files of a dataset that takes captions from elsewhere; empty without any."""
    dataset, count = scan.dataset, scan.others.unused_captions
    if not count or dataset.dataset_type == "conditioning":
        return ""
    taken = "words of its name" if dataset.caption_strategy == "filename" else f"the phrase {dataset.instance_prompt!r}"
    return (
        f"{count_noun(count, 'image')} with a {CAPTION_SUFFIX} file that is not used: with caption_strategy = "
        f"{dataset.caption_strategy} each image has {taken}; textfile reads the files"
    )


def warn_not_read(found: Discovery) -> Iterator[str]:
    if kinds := found.not_read.most_common():
        named = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds[:MAX_SUFFIXES])
        more = ", and others" if len(kinds) > MAX_SUFFIXES else ""
        example = next(each.example for each in found.others if each.example)
        heic = f"; HEIC is read after `{INSTALL}`" if BY_PLUGIN & found.not_read.keys() else ""
        frames = frames_hint([scan.dataset for scan in found.scans], found.not_read)
        count = count_noun(found.not_read.total(), "file")
        yield f"{count} not read: {named}{more}, such as {example}; what is read is {formats_of(found)}{heic}{frames}"


def formats_of(found: Discovery) -> str:
    """Name the formats that are read in these datasets."""
    by_kind = {scan.dataset.noun: formats_read(scan.dataset) for scan in found.scans}
    if len(by_kind) > 1:
        return "; ".join(f"in datasets of {noun}s {by_kind[noun]}" for noun in sorted(by_kind))
    return next(iter(by_kind.values()), "")


@dataclass(frozen=True)
class Affected:
    """The samples that a warning is about: how many, and the most extreme one."""

    count: int
    degree: float
    worst: Sample

    @classmethod
    def of(cls, samples: Samples, degree: Callable[[Sizes], np.ndarray], above: float) -> Affected | None:
        """Collect the samples whose size has more than a degree; None if there are none."""
        count, worst = 0, (above, -1, -1)
        for number, part in enumerate(samples.parts):
            of_sizes = degree(part.sizes)
            affected = np.flatnonzero(part.sizes.images_where(of_sizes > above))
            degrees = of_sizes[part.sizes.index[affected]]
            count += len(affected)
            if len(affected) and (highest := float(degrees.max())) > worst[0]:
                worst = highest, number, int(affected[degrees.argmax()])
        return cls(count, worst[0], samples.parts[worst[1]][worst[2]]) if count else None


def warn_enlarged(samples: Samples) -> Iterator[str]:
    if affected := Affected.of(samples, enlargements, MIN_ENLARGEMENT):
        geometry = affected.worst.geometry
        yield (
            f"{count_noun(affected.count, 'image')} of {len(samples):,} enlarged more than {MIN_ENLARGEMENT:g} times, "
            f"up to {affected.degree:.1f}: {affected.worst.id} from {geometry.original} to {geometry.resized} px; "
            "minimum_image_size leaves small ones out"
        )


def enlargements(sizes: Sizes) -> np.ndarray:
    """Return the factor by which images of each size are enlarged."""
    return np.maximum(*(sizes.resized / sizes.originals).T)


def extremeness(sizes: Sizes) -> np.ndarray:
    """Return how much longer the longer side of each size is."""
    return np.maximum(*sizes.originals.T) / np.minimum(*sizes.originals.T)


def warn_extreme_aspect(samples: Samples) -> Iterator[str]:
    if affected := Affected.of(samples, extremeness, EXTREME_ASPECT):
        geometry = affected.worst.geometry
        yield (
            f"{count_noun(affected.count, 'image')} with one side more than {EXTREME_ASPECT:g} times the other: "
            f"{affected.worst.id} ({geometry.original} px) is trained at {geometry.target}; minimum_aspect_ratio and "
            "maximum_aspect_ratio leave such images out"
        )


def warn_other_area(samples: DatasetSamples, alignment_px: int) -> Iterator[str]:
    """Say where aspect_bucket_alignment does not allow the resolution that was asked for."""
    dataset, sizes = samples.dataset, samples.sizes
    chosen = dataset.crop and dataset.crop_aspect in ("closest", "random")
    shapes = sizes.targets if chosen else shapes_of(dataset, sizes.originals)
    areas = np.multiply(*sizes.targets.T, dtype=np.int64)
    wanted = target_areas(dataset, shapes[:, 0] / shapes[:, 1])
    if (other := sizes.images_where(np.maximum(areas / wanted, wanted / areas) > MAX_AREA_RATIO)).any():
        first = samples[int(other.argmax())]
        yield (
            f"{count_noun(int(other.sum()), 'image')} of dataset `{dataset.id}` far from "
            f"resolution={dataset.resolution:g} ({dataset.resolution_type}): {first.id} is trained at "
            f"{first.geometry.target}, since sides are multiples of "
            f"aspect_bucket_alignment={alignment_px}"
        )


def warn_long_captions(samples: Samples) -> Iterator[str]:
    letters = [longest_captions(part) for part in samples.parts]
    count = sum(int((each > LONG_CAPTION_LETTERS).sum()) for each in letters)
    if count:
        part, most = max(zip(samples.parts, letters, strict=True), key=lambda pair: pair[1].max(initial=0))
        yield (
            f"{count_noun(count, 'image')} with a caption of more than {LONG_CAPTION_LETTERS:,} letters: no text "
            f"encoder reads it to its end ({part[int(most.argmax())].id}: {most.max():,} letters)"
        )


def longest_captions(samples: DatasetSamples) -> np.ndarray:
    """Return the letters of each sample's longest caption, where captions are files or in a table."""
    own = samples.dataset.caption_strategy not in ("filename", "instanceprompt")
    prefix = len(captions_of(samples.dataset, "", [""])[0]) if own else 0
    parts = [np.zeros(0, np.int64)]
    for lines in samples.table["captions"].chunks:
        letters = np.append(pc.utf8_length(lines.flatten()).to_numpy() + prefix, 0)  # an empty list may come last
        combine = np.add if samples.dataset.caption_lines == "one" else np.maximum
        counts = pc.list_value_length(lines).to_numpy()
        parts.append(combine.reduceat(letters, np.cumsum(counts) - counts) * (counts > 0))
    return np.concatenate(parts)[samples.rows]
