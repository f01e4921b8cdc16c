"""A store of tensor records in append-only shard files: one writer per rank, no locks, random reads by mmap.

A shard is a row of safetensors records. Its index has one JSON line per record, written after the record: a writer
killed at any moment leaves at most a record that no line names. A new writer opens new shards and never touches old
ones. A line holds a checksum over itself and the record's bytes; a record that is found damaged is retracted by a line
in a new index, so that the next start makes it again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import safetensors.torch
import torch

from simpletuner.caches.keys import Parts, differing, short_hash
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.cache_files import INDEX_SUFFIX, index_of, is_plain_file, shard_name, shard_of
from simpletuner.system.checksums import value_checksum

SHARD_BYTES = 1 << 30
RETRACTING_RANK = 999
"""In the name of shards that hold nothing but retractions: readers do not know their rank."""
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
    """Where a record is, and what it was made from; `broken` says why a record could not be made.

    `checksum` is empty for what older versions wrote.
    """

    shard: Path
    offset: int
    length: int
    name: str
    parts: Parts
    broken: str = ""
    checksum: str = ""

    def checksum_with(self, record: bytes | memoryview) -> str:
        """Return what the checksum is if `record` is what was written here."""
        return value_checksum({"name": self.name, "parts": self.parts, "broken": self.broken}, record)


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
        self._append(name, parts, b"", {"broken": reason})

    def retract(self, place: Place) -> None:
        """Declare a damaged record invalid, so that readers do not find it and it is made again."""
        self._append(place.name, place.parts, b"", {"retracts": [place.shard.name, place.offset]})

    def _append(self, name: str, parts: Parts, blob: bytes, more: Mapping[str, Any] | None = None) -> None:
        try:
            shard, index = self._files_with_room(len(blob))
            shard.write(bytes(-shard.tell() % ALIGNMENT_BYTES))  # views of the mapped file want aligned numbers
            line = {"name": name, "offset": shard.tell(), "length": len(blob), "parts": parts, **(more or {})}
            place = Place(Path(shard.name), shard.tell(), len(blob), name, parts, line.get("broken", ""))
            shard.write(blob)
            shard.flush()
            index.write(json.dumps({**line, "checksum": place.checksum_with(blob)}).encode() + b"\n")
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
            index = index_of(Path(shard.name))
            index.unlink(missing_ok=True)  # of a shard that was deleted, or a link
            self.files = shard, index.open("xb")
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

    def _fault(self, error: OSError) -> EnvironmentNotReady:
        return EnvironmentNotReady(
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
        self._checked: set[str] = set()
        entries = [entry for index in sorted(folder.glob(f"*{INDEX_SUFFIX}")) for entry in entries_in(index)]
        retracted = {entry.retracts for entry in entries}
        for place in (entry.place for entry in entries if not entry.retracts):
            if (place.shard.name, place.offset) not in retracted:
                self.places[place.name, short_hash(place.parts)] = place
                self.known.setdefault(place.name, []).append(place.parts)

    def find(self, name: str, parts: Parts) -> Place | None:
        """Return where a record made from exactly these parts lies, or None."""
        return self.places.get((name, short_hash(parts)))

    def why_missing(self, name: str, parts: Parts) -> list[str]:
        """Return which parts differ from the nearest record of this name; empty if there never was one."""
        return min((differing(known, parts) for known in self.known.get(name, [])), key=len, default=[])

    def read(self, place: Place) -> dict[str, torch.Tensor]:
        """Return a record's tensors as views of the mapped shard; stacking them makes the one copy there is.

        Raises EnvironmentFault when the record is damaged, which the next start makes again.
        """
        record = memoryview(self._map(place.shard))[place.offset : place.offset + place.length]
        try:
            if place.checksum and place.checksum not in self._checked:  # once: later reads come from memory
                if place.checksum != place.checksum_with(record):
                    raise ValueError("its checksum does not match")
                self._checked.add(place.checksum)
            return tensors_in(record)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise self._retracted(place, error) from None

    def _retracted(self, place: Place, error: Exception) -> EnvironmentNotReady:
        """Retract a damaged record, and return what to say."""
        message = f"the cache file {place.shard} is damaged at byte {place.offset}: {error}"
        try:
            with ShardWriter(self.folder, RETRACTING_RANK) as writer:
                writer.retract(place)
        except EnvironmentNotReady:
            return EnvironmentNotReady(message, f"delete {place.shard}, and run the same command again")
        return EnvironmentNotReady(message, "run the same command again: it makes this record again and resumes")

    def _map(self, shard: Path) -> mmap.mmap:
        if shard not in self._maps:
            with shard.open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants writable memory
        return self._maps[shard]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of an index: a record, or the (shard, offset) of one that it retracts."""

    place: Place
    retracts: tuple[str, int] | None = None


def entries_in(index: Path) -> Iterator[Entry]:
    """Yield the lines of an index that are whole and sensible, and whose records are within their shard."""
    shard = shard_of(index)
    if not (is_plain_file(index) and is_plain_file(shard)):
        return
    size = shard.stat().st_size
    for line in index.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is a torn line
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, AttributeError):
            entry = entry_of(json.loads(line), shard)
            if 0 <= entry.place.offset <= entry.place.offset + entry.place.length <= size:
                yield entry


def entry_of(line: Mapping[str, Any], shard: Path) -> Entry:
    """Return an index line. Raises ValueError, KeyError or TypeError for what is none."""
    parts = {str(name): str(value) for name, value in line["parts"].items()}
    numbers = int(line["offset"]), int(line["length"])
    place = Place(shard, *numbers, str(line["name"]), parts, str(line.get("broken", "")), str(line.get("checksum", "")))
    if place.broken and place.checksum and place.checksum != place.checksum_with(b""):
        raise ValueError("its checksum does not match")
    name, offset = line.get("retracts", (None, None))
    return Entry(place, None if name is None else (str(name), int(offset)))


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
