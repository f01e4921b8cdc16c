"""Compare the image files of two machines: by one digest, then one per chunk, then in detail where chunks
differ.

A chunk is chosen by a hash of the file's id, not by its index, so that one missing file changes one chunk and
not all after it. Machines that hold copies of the data may disagree on the time of change of a file; then the
first and the last block of an image, and the text of a caption, are compared instead.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import pyarrow as pa
import xxhash

from simpletuner.data.config.dataset_parts import PARQUET
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.places import MACHINE_KEYS
from simpletuner.data.images.frame_folders import frame_suffixes, is_frame_folder
from simpletuner.data.sampler.stable_choice import hash_texts
from simpletuner.data.scan.captions import form_of, lines_of, read_caption_file
from simpletuner.data.scan.file_list import CAPTION_VERSION, FileList
from simpletuner.data.storage.storage import Storage, UnreadableFileError
from simpletuner.system.files.checksums import value_checksum

# pyarrow comes without types.


# 16 KB of digests for any number of samples; of a million, one that differs costs details of about 1,000.
CHUNKS = 1024
BLOCK_BYTES = 4096
SHOWN_LETTERS = 60

# Dataset settings that may differ: machines may keep the same data under other paths or endpoints.
LOCAL_KEYS = ("instance_data_dir", "dataset_name", "cache_dir_vae", *sorted(MACHINE_KEYS))


@dataclass(frozen=True)
class FileFacts:
    """Facts that must be equal in two images of one id; plain values, so that they can be sent as JSON."""

    size_bytes: int
    version: str
    captions: list[str]
    ends: str


@dataclass(frozen=True)
class DatasetFiles:
    dataset: ImageDataset
    storage: Storage
    list: FileList

    def ids(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield each row with the id of its sample."""
        for batch in self.list.table.to_batches():
            for row in batch.to_pylist():
                yield f"{self.dataset.id}/{row['name']}", row

    def facts(self, row: Mapping[str, Any]) -> FileFacts:
        captions = []
        if row[CAPTION_VERSION] and self.dataset.caption_strategy == "textfile":
            try:
                text = read_caption_file(self.storage, row["name"], self.dataset.caption_encoding)
                captions = lines_of(text, form_of(text))
            except UnreadableFileError as error:
                captions = [f"a file that {error}"]
        return FileFacts(row["size_bytes"], row["version"], captions, hash_content(self.storage, row["name"]))


def digest_of(tables: Iterable[pa.Table]) -> str:
    digest = xxhash.xxh3_128()
    for table in tables:
        for column in table.columns:
            digest.update(f"{len(table)} {column.type}".encode())
            if pa.types.is_large_string(column.type):
                hash_texts(digest, column)
                continue
            for chunk in column.chunks:
                digest.update(chunk.to_numpy())
    return digest.hexdigest()


def chunk_index(sample_id: str) -> int:
    # crc32, because `hash` of a string differs between processes, and a cryptographic hash would cost more
    # than the rest of this for a million samples.
    return zlib.crc32(sample_id.encode()) % CHUNKS


def chunk_digests(datasets: Iterable[DatasetFiles]) -> list[str]:
    """Return one digest per chunk over the names and versions of all files."""
    digests = [hashlib.blake2b(digest_size=8) for _ in range(CHUNKS)]
    for sample_id, row in (pair for files in datasets for pair in files.ids()):
        digests[chunk_index(sample_id)].update(repr((sample_id, *row.values())).encode())
    return [digest.hexdigest() for digest in digests]


def collect_facts(datasets: Iterable[DatasetFiles], chunks: Collection[int]) -> dict[int, dict[str, dict[str, object]]]:
    """Return the facts of every file in these chunks, by chunk and id."""
    found: dict[int, dict[str, dict[str, object]]] = {chunk: {} for chunk in chunks}
    for files in datasets:
        for sample_id, row in files.ids():
            if (chunk := chunk_index(sample_id)) in found:
                found[chunk][sample_id] = asdict(files.facts(row))
    return found


def hash_content(storage: Storage, name: str) -> str:
    """Digest of a file's first and last bytes, or of a folder's frames; empty if unreadable."""
    if not is_frame_folder(name):
        return hash_ends(storage, name)
    try:
        frames = storage.list_folder(name, frame_suffixes())
    except (OSError, UnreadableFileError):
        return ""
    return value_checksum({frame.removeprefix(name): hash_ends(storage, frame) for frame in frames})


def hash_ends(storage: Storage, name: str) -> str:
    """Return a digest of the first and the last block of a file; empty for one that cannot be read."""
    try:
        with storage.open_header(name) as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(BLOCK_BYTES)
            file.seek(max(0, size - BLOCK_BYTES))
            return hashlib.blake2b(head + file.read(BLOCK_BYTES), digest_size=8).hexdigest()
    except (OSError, UnreadableFileError):
        return ""


def find_difference(first: Mapping[str, FileFacts], other: Mapping[str, FileFacts], names: tuple[str, str]) -> str:
    """Return a sentence about the first file by id that differs; empty where none does.

    `first` belongs to the rank called `names[0]`, `other` to `names[1]`.
    """
    for sample_id in sorted({*first, *other}):
        if sample_id not in other:
            return f"{sample_id} is missing on {names[1]}"
        if sample_id not in first:
            return f"{sample_id} is missing on {names[0]}"
        if difference := compare_facts(first[sample_id], other[sample_id], names):
            return f"{sample_id} has {difference}"
    return ""


def compare_facts(one: FileFacts, two: FileFacts, names: tuple[str, str]) -> str:
    """First difference of an image between two ranks; empty if there is none."""
    first, other = names
    if one.size_bytes != two.size_bytes:
        return f"{two.size_bytes} bytes on {other}, {one.size_bytes} on {first}"
    if one.version != two.version and one.ends != two.ends:
        return f"other content on {other} than on {first}"
    if one.captions != two.captions:
        pairs = zip_longest(one.captions, two.captions)
        there, here = next((quote_caption(a), quote_caption(b)) for a, b in pairs if a != b)
        return f"another caption on {other} than on {first}: {here} instead of {there}"
    return ""


def quote_caption(caption: str | None) -> str:
    if caption is None:
        return "none"
    return repr(caption if len(caption) <= SHOWN_LETTERS else caption[:SHOWN_LETTERS] + "...")


def dataset_facts(datasets: Iterable[ImageDataset]) -> dict[str, dict[str, object]]:
    """Return the settings of each dataset that must be equal on all ranks, by id."""
    left_out = {**dict.fromkeys(LOCAL_KEYS, True), PARQUET: {"path"}}
    return {dataset.id: dataset.model_dump(mode="json", exclude=left_out) for dataset in datasets}


def find_table_difference(first: Mapping[str, str], other: Mapping[str, str], names: tuple[str, str]) -> str:
    """Return a sentence about the first table, by dataset, whose version differs; empty where none does."""
    differ = (f"the table of dataset `{each}` has other content on {names[1]} than on {names[0]}" for each in first)
    return next((said for each, said in zip(first, differ, strict=True) if other.get(each) != first[each]), "")


def find_dataset_difference(
    first: Mapping[str, Mapping[str, object]], other: Mapping[str, Mapping[str, object]], names: tuple[str, str]
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
