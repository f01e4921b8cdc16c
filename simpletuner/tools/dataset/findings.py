"""Findings in a dataset, each kind with a sentence for people and all names for scripts; duplicates among them:
images of the same bytes, or of nearly the same pixels."""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.dataset_types import ImageDataset
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
from simpletuner.data.scan.captions import one_text_files
from simpletuner.data.scan.file_list import CAPTION_VERSION
from simpletuner.system.numbers import count_noun
from simpletuner.tools.dataset.contents import Content

# pyarrow comes without types.


# An image with a shorter side has nothing to learn from, whatever the resolution.
TINY_PX = 64
MAX_SUFFIXES = 6


@dataclass(frozen=True)
class DatasetFinding:
    """A kind of finding in one dataset."""

    topic: str
    """Subject: files, images, sizes, captions, repeats."""
    kind: str
    """A name for scripts."""
    count: int
    sentence: str
    images: Mapping[str, Any] = field(default_factory=dict)
    """Names of the images, with the reason or the measure."""
    ends_run: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "kind": self.kind,
            "count": self.count,
            "ends_run": self.ends_run,
            "sentence": self.sentence,
            "images": dict(self.images),
        }


def findings_of(found: Discovery, clip_fps: float = 0) -> Iterator[DatasetFinding]:
    """Yield findings from the scan of one dataset, without decoding an image; `clip_fps` is the model's frame rate."""
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
        sentence = f"{videos} shorter than min_frames or longer than max_frames: left out"
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
    """Yield the files of other formats, by suffix."""
    if kinds := found.not_read.most_common():
        named = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds[:MAX_SUFFIXES])
        more = ", and others" if len(kinds) > MAX_SUFFIXES else ""
        sentence = (
            f"{count_noun(found.not_read.total(), 'file')} not read: {named}{more}; what is read is {formats_of(found)}"
        )
        yield DatasetFinding("files", "not read", found.not_read.total(), sentence, dict(kinds))


def finding(
    topic: str, kind: str, sentence: str, images: Mapping[str, Any], ends_run: bool = False, noun: str = "image"
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


# By how many bits of dHash two images may differ, of which one of four parts of 16 bits must be the same: so
# all pairs that differ by 3 are looked at, and most of the others.
MAX_BITS = 8
PARTS = 4
MAX_DIFFERENCE = 4.0
"""Mean difference of their colours, of 255; another size and JPEG of quality 30 make up to 2."""
# Of their contrast: two photographs of gravel have the same mean colours, and differ by about their contrast.
MAX_SHARE = 0.25
# With how many of those that follow in the order of hashes an image is compared: plain images all have one
# hash.
MAX_COMPARED = 64
# Pairs whose colours are compared at once: of 100,000 plain images all of one hash they would take 400 MB.
BLOCK = 1024
# Of float32 means of bytes.
ROUNDING = 1e-3

Groups = list[list[int]]


def exact_duplicates(images: Mapping[int, Content]) -> Groups:
    """Return groups of images with the same bytes."""
    groups: dict[bytes, list[int]] = {}
    for index in sorted(images):
        groups.setdefault(images[index].checksum, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def near_duplicates(images: Mapping[int, Content]) -> Groups:
    """Return groups of images that look the same; of those with the same bytes, only the first is looked at."""
    again = {index for group in exact_duplicates(images) for index in group[1:]}
    indices = np.array(sorted(images.keys() - again), np.int64)
    if len(indices) < 2:
        return []
    found = [images[index] for index in indices.tolist()]
    pairs = (pair for first, second in close_pairs(found) for pair in zip(first, second, strict=True))
    return [indices[group].tolist() for group in joined(pairs)]


def close_pairs(images: Sequence[Content]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield pairs of images whose hashes and colours are close."""
    hashes = np.array([each.gradients for each in images], np.uint64)
    colours = np.stack([each.colours for each in images])
    quarters = quarter_means(colours)
    brightness = quarters.mean(axis=1)
    most = np.minimum(MAX_DIFFERENCE, MAX_SHARE * np.array([each.contrast for each in images]))
    for part in range(PARTS):
        shift = np.uint64(64 // PARTS * part)
        # Sorted by that part of the hash first, so that those that share it are neighbours.
        turned = (hashes << shift) | (hashes >> (np.uint64(64) - shift) if part else np.uint64(0))
        # By brightness where hashes are equal, as of plain images: only MAX_COMPARED neighbours are compared.
        order = np.lexsort((brightness, turned))
        parts, left = turned[order] >> np.uint64(64 - 64 // PARTS), np.arange(len(images))
        for distance in range(1, MAX_COMPARED):
            left = left[left + distance < len(images)]
            left = left[parts[left] == parts[left + distance]]
            first, second = order[left], order[left + distance]
            alike = np.bitwise_count(hashes[first] ^ hashes[second]) <= MAX_BITS
            # Means differ by no more than what they are means of, so no pair is lost.
            alike &= np.abs(quarters[first] - quarters[second]).mean(axis=1) <= most[first] + ROUNDING
            first, second = first[alike], second[alike]
            for start in range(0, len(first), BLOCK):
                one, other = first[start : start + BLOCK], second[start : start + BLOCK]
                difference = np.abs(colours[one].astype(np.int16) - colours[other]).mean(axis=(1, 2, 3))
                close = difference <= most[one]
                yield one[close].tolist(), other[close].tolist()


def quarter_means(colours: np.ndarray) -> np.ndarray:
    """Return the mean of each channel in each quarter, shape (images, 12)."""
    count, height, width, channels = colours.shape
    quarters = colours.reshape(count, 2, height // 2, 2, width // 2, channels)
    return quarters.mean(axis=(2, 4), dtype=np.float32).reshape(count, -1)


def joined(pairs: Iterable[tuple[int, int]]) -> Groups:
    """Return the groups that pairs make: an image belongs to the group of each that it is in a pair with."""
    parent: dict[int, int] = {}

    def root(index: int) -> int:
        while parent.setdefault(index, index) != index:
            # Path halving keeps the trees flat, however long a chain of similar images is.
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for first, second in pairs:
        low, high = sorted((root(first), root(second)))
        parent[high] = low
    groups: dict[int, list[int]] = {}
    for index in sorted(parent):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())
