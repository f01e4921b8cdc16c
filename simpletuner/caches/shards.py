"""A store of tensor records in append-only shard files: one writer per rank, no locks, random reads by mmap.

A shard is a sequence of safetensors records, each of which may be compressed; its index has one JSON line per record.
The line is written after the record, so a writer killed at any moment leaves at most a record that no line names. A new
writer opens new shards and never touches old ones. A line has a checksum over itself and the record's bytes; a damaged
record is retracted by a line in a new index, so that the next start makes it again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch

from simpletuner.caches.compression import compress_record, decompress_record
from simpletuner.caches.keys import KeyParts
from simpletuner.caches.merged_index import open_index
from simpletuner.caches.records import ALIGNMENT_BYTES, RecordLocation, record_keys
from simpletuner.caches.serialization import parse_tensors, serialize
from simpletuner.caches.shard_index import read_indexes
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.cache_files import index_of, shard_name

MAPS = 256
"""How many shards a reader keeps mapped. Page tables of a map take up to 2 MiB, and a process may have 65,530 maps."""
SHARD_BYTES = 1 << 30
RETRACTING_RANK = 999
"""In the name of shards that hold only retractions: readers do not know their rank."""


class ShardWriter:
    """Append records, compressed or not; one writer per rank, each with shards of its own."""

    def __init__(self, folder: Path, rank: int, compress: bool = False) -> None:
        self.folder, self.rank, self.compress = folder, rank, compress
        self.files: tuple[BinaryIO, BinaryIO] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, name: str, parts: KeyParts, tensors: Mapping[str, torch.Tensor]) -> None:
        """Append one record. Raises EnvironmentNotReady when the disk is full."""
        record = serialize(tensors)
        self._append(name, parts, compress_record(record) if self.compress else record)

    def write_broken(self, name: str, parts: KeyParts, reason: str) -> None:
        """Remember that a record cannot be made from these parts, so that it is not tried at every start."""
        self._append(name, parts, b"", {"broken": reason})

    def copy(self, location: RecordLocation, record: bytes) -> None:
        """Append a record of another shard as it is."""
        self._append(location.name, location.parts, record, {"broken": location.broken} if location.broken else None)

    def retract(self, location: RecordLocation) -> None:
        """Declare a damaged record invalid: readers no longer find it, so it is made again."""
        self._append(location.name, location.parts, b"", {"retracts": [location.shard.name, location.offset]})

    def _append(self, name: str, parts: KeyParts, blob: bytes, more: Mapping[str, Any] | None = None) -> None:
        try:
            shard, index = self._files_with_room(len(blob))
            shard.write(bytes(-shard.tell() % ALIGNMENT_BYTES))  # torch.frombuffer needs aligned numbers
            line = {"name": name, "offset": shard.tell(), "length": len(blob), "parts": parts, **(more or {})}
            location = RecordLocation(Path(shard.name), shard.tell(), len(blob), name, parts, line.get("broken", ""))
            shard.write(blob)
            # Flushed before the line is written: a line must never name bytes that a killed process had buffered.
            shard.flush()
            index.write(json.dumps({**line, "checksum": location.checksum_with(blob)}).encode() + b"\n")
            index.flush()
        except OSError as error:
            self._close_quietly()
            raise self._write_error(error) from None

    def _files_with_room(self, length: int) -> tuple[BinaryIO, BinaryIO]:
        """Return the open shard and its index, or the next ones when the shard is full."""
        if self.files is not None and self.files[0].tell() + length > SHARD_BYTES:
            self.close()
        if self.files is None:
            shard = self._create_shard()
            index = index_of(Path(shard.name))
            index.unlink(missing_ok=True)  # of a shard that was deleted, or a link
            self.files = shard, index.open("xb")
        return self.files

    def _create_shard(self) -> BinaryIO:
        for number in itertools.count():
            try:
                return (self.folder / shard_name(self.rank, number)).open("xb")
            except FileExistsError:
                continue
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Flush to the disk and close. Raises EnvironmentNotReady when the disk is full."""
        try:
            for file in self.files or ():
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._write_error(error) from None
        finally:
            self._close_quietly()

    def _close_quietly(self) -> None:
        for file in self.files or ():
            with contextlib.suppress(OSError):
                file.close()
        self.files = None

    def _write_error(self, error: OSError) -> EnvironmentNotReady:
        return EnvironmentNotReady(
            f"cannot write to the cache {self.folder}: {error.strerror}",
            "make room or set cache_dir_vae and cache_dir_text elsewhere, then run the same command: it continues",
        )


class ShardReader:
    """Find and read records by name and parts; a snapshot of what was in the folder when it was opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = open_index(folder)
        self._verified = np.zeros(len(self.index.rows), bool)
        self._map = lru_cache(MAPS)(map_shard)

    def find(self, name: str, parts: KeyParts) -> RecordLocation | None:
        """Return where the record made from exactly these parts is, or None."""
        row = int(self.index.find(record_keys([(name, parts)]))[0])
        return None if row < 0 else self.index.location(self.folder, row, name, parts)

    def records(self) -> Iterator[RecordLocation]:
        """Yield all records that can be found, by reading the shards' own indexes, which have their names."""
        for line in (entry.location for entry in read_indexes(self.folder)):
            location = self.find(line.name, line.parts)
            if location and (location.shard, location.offset) == (line.shard, line.offset):
                yield location

    def read(self, location: RecordLocation) -> dict[str, torch.Tensor]:
        """Return a record's tensors: views of the mapped shard unless it is compressed, so stacking is the only copy.

        Raises EnvironmentNotReady when the record is damaged; the next start makes it again.
        """
        record = self._record(location)
        try:
            if location.checksum and not self._verified[location.row]:  # once: later reads come from memory
                if location.checksum != location.checksum_with(record):
                    raise ValueError("its checksum does not match")
                self._verified[location.row] = True
            return parse_tensors(decompress_record(record))
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise self._retract(location, error) from None

    def _retract(self, location: RecordLocation, error: Exception) -> EnvironmentNotReady:
        """Retract a damaged record, and return the error to raise.

        The run ends instead of computing the record again: by now the encoders are freed, and the other ranks train.
        """
        where = f"{location.shard} is damaged at byte {location.offset}, in the record {location.name}"
        message = f"the cache file {where}: {error}"
        try:
            with ShardWriter(self.folder, RETRACTING_RANK) as writer:
                writer.retract(location)
        except EnvironmentNotReady:
            return EnvironmentNotReady(message, f"delete {location.shard}, and run the same command again")
        return EnvironmentNotReady(
            message, "run the same command again: it makes this record again, then resumes from the newest checkpoint"
        )

    def _record(self, location: RecordLocation) -> memoryview:
        return self._map(location.shard)[location.offset : location.offset + location.length]


def map_shard(shard: Path) -> memoryview:
    """Map a shard privately: torch.frombuffer wants writable memory, and writing there must not change the cache.

    The map lives as long as any tensor in it. It holds no file descriptor, of which a process may have only 1,024;
    mmap.mmap would.
    """
    size = shard.stat().st_size  # raises OSError, where torch would raise RuntimeError
    return torch.from_file(str(shard), shared=False, size=size, dtype=torch.uint8).numpy().data
