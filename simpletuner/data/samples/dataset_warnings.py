"""Warnings about images and clips: one line per kind, with a count and an example.

Small datasets are checked before torch is imported and ranks are started.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.dataset_parts import Window
from simpletuner.data.config.dataset_types import ImageDataset, LocalImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.config.places import latents_folder
from simpletuner.data.images.geometry import shapes_of, target_areas
from simpletuner.data.images.image_formats import BY_PLUGIN, INSTALL
from simpletuner.data.samples.buckets import fill_buckets, make_buckets
from simpletuner.data.samples.discovery import Discovery, discover
from simpletuner.data.samples.file_remarks import captions_found, file_remarks, formats_read, frames_hint
from simpletuner.data.samples.samples import DatasetSamples, Sample, Samples, held_out_indices
from simpletuner.data.samples.sizes import Sizes
from simpletuner.data.scan.captions import captions_of
from simpletuner.data.scan.file_list import list_images
from simpletuner.data.scan.scan import Scan, scan_files
from simpletuner.data.storage.storage import CAPTION_SUFFIX, open_storage
from simpletuner.settings import Settings
from simpletuner.settings.values.shape import Shape
from simpletuner.system.numbers import count_noun

# pyarrow comes without types.


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
    """Sentence about the caption files of a dataset that takes captions from elsewhere; empty without any."""
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
    by_kind = {scan.dataset.noun: formats_read(scan.dataset) for scan in found.scans}
    if len(by_kind) > 1:
        return "; ".join(f"in datasets of {noun}s {by_kind[noun]}" for noun in sorted(by_kind))
    return next(iter(by_kind.values()), "")


@dataclass(frozen=True)
class AffectedImages:
    """The samples that a warning is about: how many, and the most extreme one."""

    count: int
    degree: float
    worst: Sample

    @classmethod
    def of(cls, samples: Samples, degree: Callable[[Sizes], np.ndarray], above: float) -> AffectedImages | None:
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
    if affected := AffectedImages.of(samples, enlargements, MIN_ENLARGEMENT):
        geometry = affected.worst.geometry
        yield (
            f"{count_noun(affected.count, 'image')} of {len(samples):,} enlarged more than {MIN_ENLARGEMENT:g} times, "
            f"up to {affected.degree:.1f}: {affected.worst.id} from {geometry.original} to {geometry.resized} px; "
            "minimum_image_size leaves small ones out"
        )


def enlargements(sizes: Sizes) -> np.ndarray:
    """Enlargement factor of images, per size."""
    return np.maximum(*(sizes.resized / sizes.originals).T)


def aspect_ratios(sizes: Sizes) -> np.ndarray:
    return np.maximum(*sizes.originals.T) / np.minimum(*sizes.originals.T)


def warn_extreme_aspect(samples: Samples) -> Iterator[str]:
    if affected := AffectedImages.of(samples, aspect_ratios, EXTREME_ASPECT):
        geometry = affected.worst.geometry
        yield (
            f"{count_noun(affected.count, 'image')} with one side more than {EXTREME_ASPECT:g} times the other: "
            f"{affected.worst.id} ({geometry.original} px) is trained at {geometry.target}; minimum_aspect_ratio and "
            "maximum_aspect_ratio leave such images out"
        )


def warn_other_area(samples: DatasetSamples, alignment_px: int) -> Iterator[str]:
    """Warn if aspect_bucket_alignment does not allow the resolution of the settings."""
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
        letters = np.append(pc.utf8_length(lines.flatten()).to_numpy() + prefix, 0)  # a last list may be empty
        combine = np.add if samples.dataset.caption_lines == "one" else np.maximum
        counts = pc.list_value_length(lines).to_numpy()
        parts.append(combine.reduceat(letters, np.cumsum(counts) - counts) * (counts > 0))
    return np.concatenate(parts)[samples.rows]


# pyarrow comes without types.


# Ranks read all headers again: a second for so many on a slow disk. Larger datasets seldom lack images.
MOST_FILES = 2000


def check_few_images(settings: Settings) -> None:
    """Raise DataError for local datasets of few images whose buckets cannot fill the effective batch.

    Ranks find the same in any data, but each of them imports torch before.
    """
    datasets, _ = load_datasets(settings.data, settings.model.model_type)
    outputs = [settings.training.output_dir, *(latents_folder(dataset, settings) for dataset in datasets)]
    folders = [dataset.instance_data_dir for dataset in datasets if isinstance(dataset, LocalImages)]
    # Of a video the first frame is decoded as well, which takes 20 times as long as an image's header.
    is_plain = all(
        not (each.parquet or each.clips or each.prior_images) and each.window == Window() for each in datasets
    )
    has_few = len(list(islice(files_in(folders), MOST_FILES + 1))) <= MOST_FILES
    if len(folders) < len(datasets) or not (is_plain and has_few):
        return
    scans = [scan_of(dataset, outputs) for dataset in datasets]
    side_px = settings.data.aspect_bucket_alignment
    found = discover(scans, Shape(1, side_px, side_px), settings.training.seed)
    if any(found.errors()):  # the ranks say these, and what is wrong with the buckets as well
        return
    samples = found.samples
    buckets = make_buckets(samples, held_out_indices(samples, settings.validation.eval_split))
    if buckets:  # else the ranks say why no image is left
        fill_buckets(buckets, settings.effective_batch_size, settings.data.allow_dataset_oversubscription)


def files_in(folders: Sequence[Path]) -> Iterator[str]:
    for folder in folders:
        for _, _, files in os.walk(folder):
            yield from files


def scan_of(dataset: ImageDataset, outputs: Sequence[Path]) -> Scan:
    storage = open_storage(dataset, outputs)
    files = list_images(dataset, storage, lambda: None)
    rows = scan_files(dataset, storage, files.table.to_pylist())
    return Scan(dataset, storage, pa.Table.from_batches([rows]), files.others)


# pyarrow comes without types.


# Relative tolerance of frame rates: 29.97 counts as 30, and 23.976 as 24.
TOLERANCE = 0.02
MAX_RATES = 4


def remark_on_rates(scan: Scan, model_fps: float) -> tuple[int, str]:
    """Number of videos with another frame rate than the model's, after `fps` of the dataset, and a sentence
    on them.

    Families place frames by their number, so a film of 60 per second would teach LTX-Video, of 25, motion at
    0.4 of its speed. 0 where all fit, or the model has no rate.
    """
    if (video := scan.dataset.clips) is None or not model_fps:
        return 0, ""
    frames, fps = (scan.table[name].to_numpy() for name in ("frames", "fps"))
    fps = np.where((fps == 0) & (frames > 1), video.frame_folders_fps or 0, fps)
    shown = np.minimum(fps, video.fps or np.inf)
    differ = np.flatnonzero((frames > 1) & (fps > 0) & (np.abs(shown / model_fps - 1) > TOLERANCE))
    if not len(differ):
        return 0, ""
    rates = Counter(f"{rate:.4g}" for rate in shown[differ])
    named = ", ".join(f"{count:,} of {rate}" for rate, count in rates.most_common(MAX_RATES))
    more = ", and others" if len(rates) > MAX_RATES else ""
    slow = int(np.count_nonzero(shown[differ] < model_fps))
    hints = [f'`"fps": {model_fps:g}` in the block `video` takes fewer frames of faster ones'] * (slow < len(differ))
    hints += ["slower ones are learned faster than they are"] * bool(slow)
    return len(differ), (
        f"dataset `{scan.dataset.id}`: {count_noun(len(differ), 'video')} with other frames per second than the "
        f"{model_fps:g} of the model: {named}{more} (such as {scan.table['name'][int(differ[0])]}); {'; '.join(hints)}"
    )
