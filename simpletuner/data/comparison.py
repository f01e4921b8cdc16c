"""Compare the samples of two ranks: by one digest per chunk, then in detail, but only in chunks that differ.

A chunk is chosen by a hash of the sample's id, not by its index, so that one missing file changes one chunk and not all
after it. Machines that hold copies of the data may disagree on the time of change of a file; then the first and the
last block of the file are compared instead.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from simpletuner.data.datasets import ImageDataset
from simpletuner.data.discovery import Sample

CHUNKS = 1024
"""16 KB of digests for any number of samples; of a million, one that differs costs details of about 1,000."""
BLOCK_BYTES = 4096
SHOWN_LETTERS = 60

LOCAL_KEYS = ("instance_data_dir", "cache_dir_vae")
"""Settings of a dataset that may differ: machines may keep the same data under other paths."""


@dataclass(frozen=True)
class SampleFacts:
    """What must be equal in two samples of one id; plain values, so that they can be sent as JSON."""

    version: str
    size: list[int]
    geometry: list[list[int]]
    captions: list[str]
    ends: str

    @property
    def size_bytes(self) -> int:
        return int(self.version.partition("-")[0])


def chunk_index(sample_id: str) -> int:
    # crc32, because `hash` of a string differs between processes, and a cryptographic hash would cost more than the
    # rest of this for a million samples.
    return zlib.crc32(sample_id.encode()) % CHUNKS


def chunk_digests(samples: Iterable[Sample]) -> list[str]:
    """Return one digest per chunk over everything that decides what is trained on; `samples` are in their order."""
    digests = [hashlib.blake2b(digest_size=8) for _ in range(CHUNKS)]
    for sample in samples:
        line = repr((sample.id, sample.version, sample.geometry, sample.captions))
        digests[chunk_index(sample.id)].update(line.encode())
    return [digest.hexdigest() for digest in digests]


def collect_facts(samples: Iterable[Sample], chunks: Collection[int]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the facts of every sample in these chunks, by chunk and id."""
    found: dict[int, dict[str, dict[str, Any]]] = {chunk: {} for chunk in chunks}
    for sample in samples:
        if (chunk := chunk_index(sample.id)) in found:
            g = sample.geometry
            geometry = [list(g.resized), list(g.crop_left_top), list(g.target)]
            facts = SampleFacts(sample.version, list(g.original), geometry, list(sample.captions), hash_ends(sample))
            found[chunk][sample.id] = asdict(facts)
    return found


def hash_ends(sample: Sample) -> str:
    """Return a digest of the first and the last block of an image file; empty for one that cannot be read."""
    try:
        with sample.open() as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(BLOCK_BYTES)
            file.seek(max(0, size - BLOCK_BYTES))
            return hashlib.blake2b(head + file.read(BLOCK_BYTES), digest_size=8).hexdigest()
    except OSError:
        return ""


def find_difference(
    first: Mapping[str, SampleFacts],
    other: Mapping[str, SampleFacts],
    names: tuple[str, str],
    broken: Mapping[str, str],
) -> str:
    """Return a sentence about the first sample by id that differs; empty where none does.

    `first` belongs to the rank called `names[0]`, `other` to `names[1]`, which left out `broken` with a reason.
    """
    for sample_id in sorted({*first, *other}):
        if sample_id not in other:
            reason = f" ({broken[sample_id]})" if sample_id in broken else ""
            return f"{sample_id} is missing on {names[1]}{reason}"
        if sample_id not in first:
            return f"{sample_id} is missing on {names[0]}"
        if difference := compare_facts(first[sample_id], other[sample_id], names):
            return f"{sample_id} has {difference}"
    return ""


def compare_facts(one: SampleFacts, two: SampleFacts, names: tuple[str, str]) -> str:
    """Return what differs between a sample on the first and on the other rank; empty for nothing."""
    first, other = names
    if one.size_bytes != two.size_bytes:
        return f"{two.size_bytes} bytes on {other}, {one.size_bytes} on {first}"
    if one.version != two.version and one.ends != two.ends:
        return f"other content on {other} than on {first}"
    if one.captions != two.captions:
        pairs = zip_longest(one.captions, two.captions)
        there, here = next((quote_caption(a), quote_caption(b)) for a, b in pairs if a != b)
        return f"another caption on {other} than on {first}: {here} instead of {there}"
    if (one.size, one.geometry) != (two.size, two.geometry):
        return f"another size on {other} than on {first}: {format_size(two)} instead of {format_size(one)}"
    return ""


def quote_caption(caption: str | None) -> str:
    if caption is None:
        return "none"
    return repr(caption if len(caption) <= SHOWN_LETTERS else caption[:SHOWN_LETTERS] + "...")


def format_size(facts: SampleFacts) -> str:
    (width, height), (bucket_width, bucket_height) = facts.size, facts.geometry[-1]
    return f"{width}x{height} px for bucket {bucket_width}x{bucket_height}"


def adopt_versions(samples: Sequence[Sample], first: Mapping[str, SampleFacts]) -> list[Sample]:
    """Return the samples with rank 0's file versions: caches are keyed by them, so all ranks must use the same."""
    return [replace(s, version=first[s.id].version) if s.id in first else s for s in samples]


def dataset_facts(datasets: Iterable[ImageDataset]) -> dict[str, dict[str, Any]]:
    """Return the settings of each dataset that must be equal on all ranks, by id."""
    return {dataset.id: dataset.model_dump(mode="json", exclude=set(LOCAL_KEYS)) for dataset in datasets}


def find_dataset_difference(
    first: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]], names: tuple[str, str]
) -> str:
    """Return a sentence about the first setting of a dataset that differs; empty where none does."""
    for dataset in [*first, *other]:
        if dataset not in first or dataset not in other:
            return f"dataset `{dataset}` is missing on {names[dataset in first]}"
        for key, value in first[dataset].items():
            there = other[dataset].get(key)
            if there != value:
                return f"{key} of dataset `{dataset}` is {there!r} on {names[1]}, {value!r} on {names[0]}"
    return ""
