"""A store of tensor records in append-only shard files: one writer per rank, no locks, random reads by mmap.

A shard is a row of safetensors records. Beside it lies its index, one JSON line per record, written after the record:
a writer killed at any moment leaves at most a record that no line names. A new writer opens new shards and never
touches old ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import safetensors.torch
import torch

from simpletuner.caches.keys import Parts, differing, short_hash
from simpletuner.errors import EnvironmentFault
from simpletuner.ops.cache.layout import INDEX_SUFFIX, index_of, shard_name, shard_of

SHARD_BYTES = 1 << 30
ALIGNMENT_BYTES = 8
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
"""What a record may hold, by the names of safetensors."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies, and what it was made from; `broken` says why a record could not be made."""

    shard: Path
    offset: int
    length: int
    parts: Parts
    broken: str = ""


class ShardWriter:
    """Append records; one writer per rank, each with shards of its own."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.files: tuple[BinaryIO, BinaryIO] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, name: str, parts: Parts, tensors: Mapping[str, torch.Tensor]) -> None:
        """Append one record of DTYPES. Raises EnvironmentFault when the disk is full."""
        assert {tensor.dtype for tensor in tensors.values()} <= {*DTYPES.values()}, "a record that could not be read"
        self._append(name, parts, safetensors.torch.save({key: t.contiguous() for key, t in tensors.items()}))

    def write_broken(self, name: str, parts: Parts, reason: str) -> None:
        """Remember that a record cannot be made from these parts, so that it is not tried at every start."""
        self._append(name, parts, b"", reason)

    def _append(self, name: str, parts: Parts, blob: bytes, broken: str = "") -> None:
        try:
            shard, index = self._files_with_room(len(blob))
            shard.write(bytes(-shard.tell() % ALIGNMENT_BYTES))  # views of the mapped file want aligned numbers
            line = {"name": name, "offset": shard.tell(), "length": len(blob), "parts": parts}
            shard.write(blob)
            shard.flush()
            index.write(json.dumps(line | ({"broken": broken} if broken else {})).encode() + b"\n")
            index.flush()
        except OSError as error:
            self._abandon()
            raise self._fault(error) from None

    def _files_with_room(self, length: int) -> tuple[BinaryIO, BinaryIO]:
        """Return the open shard and its index, or the next ones when the shard is full."""
        if self.files is not None and self.files[0].tell() + length > SHARD_BYTES:
            self.close()
        if self.files is None:
            shard = self._new_shard()
            self.files = shard, index_of(Path(shard.name)).open("wb")
        return self.files

    def _new_shard(self) -> BinaryIO:
        for number in itertools.count():
            try:
                return (self.folder / shard_name(self.rank, number)).open("xb")
            except FileExistsError:
                continue
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Bring what was written to the disk."""
        try:
            for file in self.files or ():
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._fault(error) from None
        finally:
            self._abandon()

    def _abandon(self) -> None:
        for file in self.files or ():
            with contextlib.suppress(OSError):
                file.close()
        self.files = None

    def _fault(self, error: OSError) -> EnvironmentFault:
        return EnvironmentFault(
            f"cannot write to the cache {self.folder}: {error.strerror}",
            "make room or set cache_dir_vae and cache_dir_text elsewhere, then run the same command: it continues",
        )


class ShardReader:
    """Find and read records by name and parts; a snapshot of what was in the folder when it was opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[tuple[str, str], Place] = {}
        self.known: dict[str, list[Parts]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for index in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
            self._read_index(index)

    def _read_index(self, index: Path) -> None:
        shard = shard_of(index)
        size = shard.stat().st_size if shard.exists() else 0
        for line in index.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is a torn line
            try:
                entry = json.loads(line)
                name = entry["name"]
                place = Place(shard, entry["offset"], entry["length"], entry["parts"], entry.get("broken", ""))
            except (ValueError, KeyError, TypeError):
                continue
            if place.offset + place.length <= size:
                self.places[name, short_hash(place.parts)] = place
                self.known.setdefault(name, []).append(place.parts)

    def find(self, name: str, parts: Parts) -> Place | None:
        """Return where a record made from exactly these parts lies, or None."""
        return self.places.get((name, short_hash(parts)))

    def why_missing(self, name: str, parts: Parts) -> list[str]:
        """Return which parts differ from the nearest record of this name; empty if there never was one."""
        return min((differing(known, parts) for known in self.known.get(name, [])), key=len, default=[])

    def read(self, place: Place) -> dict[str, torch.Tensor]:
        """Return a record's tensors as views of the mapped shard; stacking them makes the one copy there is.

        Raises EnvironmentFault when the shard is damaged.
        """
        record = memoryview(self._map(place.shard))[place.offset : place.offset + place.length]
        try:
            return tensors_in(record)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise EnvironmentFault(
                f"the cache file {place.shard} is damaged at byte {place.offset}: {error}",
                f"delete {place.shard} and run the same command again: its records are made anew",
            ) from None

    def _map(self, shard: Path) -> mmap.mmap:
        if shard not in self._maps:
            with shard.open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants writable memory
        return self._maps[shard]


def tensors_in(record: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors record without a copy; they keep the memory under them alive."""
    start = 8 + int.from_bytes(record[:8], "little")
    header = json.loads(bytes(record[8:start]))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype, values = DTYPES[entry["dtype"]], record[start + first : start + last]
        flat = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(entry["shape"])
    return tensors
