"""Findings in a dataset, each kind with a sentence for people and all names for scripts."""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.samples.caption_lines import one_text_files
from simpletuner.data.samples.dataset_summary import MUCH_ENLARGED
from simpletuner.data.samples.dataset_warnings import (
    EXTREME_ASPECT,
    aspect_ratios,
    enlargements,
    formats_of,
    remark_on_rates,
    unused_captions,
)
from simpletuner.data.samples.discovery import Discovery
from simpletuner.data.samples.file_remarks import captions_found, file_remarks
from simpletuner.data.samples.samples import DatasetSamples
from simpletuner.data.samples.sizes import Sizes
from simpletuner.data.scan.file_list import CAPTION_VERSION
from simpletuner.system.numbers import count_noun

# pyarrow comes without types.


# An image with a shorter side has nothing to learn from, whatever the resolution.
TINY_PX = 64
MAX_SUFFIXES = 6


@dataclass(frozen=True)
class DatasetFinding:
    topic: str
    """Subject: files, images, sizes, captions, repeats."""
    kind: str
    """A name for scripts."""
    count: int
    sentence: str
    images: Mapping[str, Any] = field(default_factory=dict)
    """Names of the images, with the reason or the measure."""
    ends_run: bool = False

    def as_json(self) -> dict[str, object]:
        return {
            "topic": self.topic,
            "kind": self.kind,
            "count": self.count,
            "ends_run": self.ends_run,
            "sentence": self.sentence,
            "images": dict(self.images),
        }


def findings_of(found: Discovery, clip_fps: float = 0) -> Iterator[DatasetFinding]:
    """Yield findings from a dataset's scan, without decoding; `clip_fps` is the model's frame rate."""
    (scan,), (samples,) = found.scans, found.samples.parts
    yield from unread_files(found)
    count, sentence = remark_on_rates(scan, clip_fps)
    if count:
        yield DatasetFinding("images", "frame rates", count, sentence)
    for kind, count, sentence in file_remarks(scan):
        yield DatasetFinding("files", kind, count, sentence)
    prefix = f"{scan.dataset.id}/"
    broken = {name.removeprefix(prefix): why for name, why in found.broken.items()}
    yield from finding("images", "broken", "{} that cannot be read: left out", broken)
    if found.unwanted:
        sentence = f"{count_noun(found.unwanted, 'image')} outside the limits of size or aspect: left out"
        yield DatasetFinding("images", "outside limits", found.unwanted, sentence)
    if found.other_lengths:
        videos = count_noun(found.other_lengths, "video")
        sentence = f"{videos} shorter than min_frames or a clip, or longer than max_frames: left out"
        yield DatasetFinding("images", "other lengths", found.other_lengths, sentence)
    if found.surplus:
        yield DatasetFinding(
            "images", "surplus", found.surplus, f"{count_noun(found.surplus, 'image')} left out by max_num_samples"
        )
    animated = {name.removeprefix(prefix): "" for name in found.animated}
    yield from finding("images", "several frames", "{} with several frames: the first is used", animated)
    yield from findings_on_sizes(samples)
    yield from findings_on_captions(found)
    for remark in scan.others.table_remarks:
        yield DatasetFinding("captions", "table", 1, remark)


def unread_files(found: Discovery) -> Iterator[DatasetFinding]:
    if kinds := found.not_read.most_common():
        named = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds[:MAX_SUFFIXES])
        more = ", and others" if len(kinds) > MAX_SUFFIXES else ""
        sentence = (
            f"{count_noun(found.not_read.total(), 'file')} not read: {named}{more}; what is read is {formats_of(found)}"
        )
        yield DatasetFinding("files", "not read", found.not_read.total(), sentence, dict(kinds))


def finding(
    topic: str, kind: str, sentence: str, images: Mapping[str, object], ends_run: bool = False, noun: str = "image"
) -> Iterator[DatasetFinding]:
    """Yield a finding about images, the first of which is the example; nothing if there are none."""
    if images:
        name, why = next(iter(images.items()))
        example = f"{name} {why}".strip()
        said = f"{sentence.format(count_noun(len(images), noun))} ({example})"
        yield DatasetFinding(topic, kind, len(images), said, images, ends_run)


def findings_on_sizes(samples: DatasetSamples) -> Iterator[DatasetFinding]:
    """Yield images that are enlarged, tiny or extreme, the worst first."""

    def pixels(image: int) -> str:
        original, resized, _ = samples.sizes.of(image)
        return f"{original} to {resized} px"

    def of_target(image: int) -> str:
        original, _, target = samples.sizes.of(image)
        return f"{original} px, trained at {target}"

    yield from measured(samples, "enlarged", f"{{}} enlarged more than {MUCH_ENLARGED:g} times", enlarged, pixels)
    yield from measured(samples, "tiny", f"{{}} with a side of less than {TINY_PX} px", smallness, pixels)
    sentence = f"{{}} with one side more than {EXTREME_ASPECT:g} times the other"
    yield from measured(samples, "extreme aspect", sentence, too_long, of_target)


def enlarged(sizes: Sizes) -> np.ndarray:
    return enlargements(sizes) - MUCH_ENLARGED


def smallness(sizes: Sizes) -> np.ndarray:
    return TINY_PX - sizes.originals.min(axis=1)


def too_long(sizes: Sizes) -> np.ndarray:
    return aspect_ratios(sizes) - EXTREME_ASPECT


def measured(
    samples: DatasetSamples,
    kind: str,
    sentence: str,
    excess: Callable[[Sizes], np.ndarray],
    describe: Callable[[int], str],
) -> Iterator[DatasetFinding]:
    """Yield the images whose size has an excess above 0."""
    if not len(samples):
        return
    excesses = excess(samples.sizes)[samples.sizes.index]
    order = np.argsort(-excesses, kind="stable")[: int((excesses > 0).sum())]
    names = samples.names.take(pa.array(order)).to_pylist()
    worst = dict(zip(names, map(describe, order.tolist()), strict=True))
    yield from finding("sizes", kind, sentence, worst)


def findings_on_captions(found: Discovery) -> Iterator[DatasetFinding]:
    """Yield captions that are missing, empty or not text."""
    (scan,), dataset = found.scans, found.scans[0].dataset
    missing, empty = split_uncaptioned(dataset, scan.table, found.uncaptioned[dataset.id])
    end = not dataset.skip_uncaptioned
    fate = "; --skip_uncaptioned leaves such images out" if end else ": left out"
    where = {"textfile": "a caption file", "filename": "words in their name"}.get(dataset.caption_strategy, "a caption")
    yield from finding("captions", "missing", f"{{}} without {where}{fate}", dict.fromkeys(missing, ""), end)
    if missing:
        for said in captions_found(scan.others):
            yield DatasetFinding("captions", "not read", len(missing), said)
    yield from finding("captions", "empty", f"{{}} whose caption is empty{fate}", dict.fromkeys(empty, ""), end)
    lines = found.caption_lines[dataset.id]
    if remark := lines.remark(dataset):
        texts = dict(zip(*(column.to_pylist() for column in one_text_files(scan.table).columns), strict=True))
        yield DatasetFinding("captions", "several lines", lines.texts, remark, texts)
    if unused := unused_captions(scan):
        yield DatasetFinding("captions", "not used", scan.others.unused_captions, unused)
    unreadable = found.unreadable_captions[dataset.id]
    sentence = "{} that cannot be read as text: --caption_encoding names their encoding"
    yield from finding("captions", "encoding", sentence, unreadable, True, "caption file")


def split_uncaptioned(dataset: ImageDataset, table: pa.Table, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return images without a caption file, and those whose file is empty."""
    if dataset.caption_strategy != "textfile" or not names:
        return list(names), []
    with_file = table.filter(pc.not_equal(table[CAPTION_VERSION], ""))["name"]
    is_empty = pc.is_in(pa.array(names, pa.large_string()), value_set=with_file).to_pylist()
    missing = [name for name, has_file in zip(names, is_empty, strict=True) if not has_file]
    return missing, [name for name, has_file in zip(names, is_empty, strict=True) if has_file]
