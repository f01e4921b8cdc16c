"""Compare the samples of two ranks: by one digest per chunk, then in detail, but only in chunks that differ.

Chunks are chosen by a hash of the sample's id, so that one missing file changes one chunk. The time of change of a file
may differ between machines that hold copies; then the first and last block of the file are compared instead.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from simpletuner.data.datasets import ImageDataset
from simpletuner.data.discovery import Sample

CHUNKS = 1024
BLOCK_BYTES = 4096
SHOWN_LETTERS = 60

FOLDERS = ("instance_data_dir", "cache_dir_vae")
"""Where machines may keep the same data under other paths."""


@dataclass(frozen=True)
class Facts:
    """What must be equal in two samples of one id; plain values, so that they can travel as JSON."""

    version: str
    size: list[int]
    geometry: list[list[int]]
    captions: list[str]
    ends: str

    @property
    def size_bytes(self) -> int:
        """Return the size of the file."""
        return int(self.version.partition("-")[0])


def chunk_of(sample_id: str) -> int:
    """Return the chunk in which a sample is compared."""
    return zlib.crc32(sample_id.encode()) % CHUNKS


def chunk_digests(samples: Iterable[Sample]) -> list[str]:
    """Return one digest per chunk over everything that decides what is trained on; `samples` are sorted by id."""
    digests = [hashlib.blake2b(digest_size=8) for _ in range(CHUNKS)]
    for sample in samples:
        line = repr((sample.id, sample.version, sample.geometry, sample.captions))
        digests[chunk_of(sample.id)].update(line.encode())
    return [digest.hexdigest() for digest in digests]


def details(samples: Iterable[Sample], chunks: Collection[int]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the facts of every sample in these chunks, by chunk and id."""
    found: dict[int, dict[str, dict[str, Any]]] = {chunk: {} for chunk in chunks}
    for sample in samples:
        if (chunk := chunk_of(sample.id)) in found:
            g = sample.geometry
            geometry = [list(g.resized), list(g.crop_left_top), list(g.target)]
            facts = Facts(sample.version, list(g.original), geometry, list(sample.captions), ends_of(sample.path))
            found[chunk][sample.id] = asdict(facts)
    return found


def ends_of(path: Path) -> str:
    """Return a digest of the first and the last block of a file, empty for one that cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(BLOCK_BYTES)
            file.seek(-min(BLOCK_BYTES, path.stat().st_size), 2)
            return hashlib.blake2b(head + file.read(BLOCK_BYTES), digest_size=8).hexdigest()
    except OSError:
        return ""


def first_difference(
    first: Mapping[str, Facts], other: Mapping[str, Facts], names: tuple[str, str], broken: Mapping[str, str]
) -> str:
    """Return a sentence about the first sample by id that differs, empty where none does.

    `first` belongs to the rank called `names[0]`, `other` to `names[1]`, which left out `broken` with a reason.
    """
    for sample_id in sorted({*first, *other}):
        if sample_id not in other:
            reason = f" ({broken[sample_id]})" if sample_id in broken else ""
            return f"{sample_id} is missing on {names[1]}{reason}"
        if sample_id not in first:
            return f"{sample_id} is missing on {names[0]}"
        if told := difference(first[sample_id], other[sample_id], names):
            return f"{sample_id} has {told}"
    return ""


def difference(one: Facts, two: Facts, names: tuple[str, str]) -> str:
    """Return what differs between a sample on the first and on the other rank; empty for nothing."""
    first, other = names
    if one.size_bytes != two.size_bytes:
        return f"{two.size_bytes} bytes on {other}, {one.size_bytes} on {first}"
    if one.version != two.version and one.ends != two.ends:
        return f"other content on {other} than on {first}"
    if one.captions != two.captions:
        pairs = zip_longest(one.captions, two.captions)
        there, here = next((shown(a), shown(b)) for a, b in pairs if a != b)
        return f"another caption on {other} than on {first}: {here} instead of {there}"
    if (one.size, one.geometry) != (two.size, two.geometry):
        return f"another size on {other} than on {first}: {pixels(two)} instead of {pixels(one)}"
    return ""


def shown(caption: str | None) -> str:
    """Return the beginning of a caption in quotes."""
    if caption is None:
        return "none"
    return repr(caption if len(caption) <= SHOWN_LETTERS else caption[:SHOWN_LETTERS] + "...")


def pixels(facts: Facts) -> str:
    """Return a picture's size and its bucket, as text."""
    (width, height), (bucket_width, bucket_height) = facts.size, facts.geometry[-1]
    return f"{width}x{height} px for bucket {bucket_width}x{bucket_height}"


def with_versions(samples: Sequence[Sample], first: Mapping[str, Facts]) -> list[Sample]:
    """Return the samples with the first rank's time of change: caches are keyed by it, on all ranks alike."""
    return [replace(s, version=first[s.id].version) if s.id in first else s for s in samples]


def facts_of_datasets(datasets: Iterable[ImageDataset]) -> dict[str, dict[str, Any]]:
    """Return what all ranks must say about each dataset, by id; folders may have another path elsewhere."""
    return {dataset.id: dataset.model_dump(mode="json", exclude=set(FOLDERS)) for dataset in datasets}


def differing_datasets(
    first: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]], names: tuple[str, str]
) -> str:
    """Return a sentence about the first setting of a dataset that differs, empty where none does."""
    for dataset in [*first, *other]:
        if dataset not in first or dataset not in other:
            return f"dataset `{dataset}` is missing on {names[dataset in first]}"
        for key, value in first[dataset].items():
            there = other[dataset].get(key)
            if there != value:
                return f"{key} of dataset `{dataset}` is {there!r} on {names[1]}, {value!r} on {names[0]}"
    return ""
