"""A store of tensor records in append-only shard files: one writer per rank, no locks, random reads by mmap.

A shard is a sequence of safetensors records, compressed or not; its index has one JSON line per record. The
line is written after the record, so a writer killed at any moment leaves at most a record without a line. A
new writer opens new shards and never touches old ones. A line has a checksum over itself and the record's
bytes; a line in a new index retracts a damaged record, so that the next start makes it again.

A note in a cache folder lists requests with all their records, so that a warm start looks up none. It holds
for shards with the same hash of sizes and times, and for one version of simpletuner; one more record, a
retracted one or a deleted shard makes it void, as does a wrong checksum.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from simpletuner import __version__
from simpletuner.caches.store.records import (
    ALIGNMENT_BYTES,
    KeyParts,
    RecordLocation,
    compress_record,
    decompress_record,
    parse_tensors,
    record_keys,
    serialize,
    short_hash,
)
from simpletuner.caches.store.shard_index import Source, open_index, read_indexes
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.atomic import write_file
from simpletuner.system.files.cache_files import COMPLETE, index_of, is_plain_file, shard_name
from simpletuner.system.files.checksums import is_intact, with_checksum
from simpletuner.system.files.locks import flock_without_waiting
from simpletuner.system.files.mounts import sync
from simpletuner.system.files.regular_files import read_file

if TYPE_CHECKING:
    from simpletuner.caches.store.mirror import Mirror

# Shards that a reader keeps mapped: page tables take 2 MiB each, and 65,530 maps are allowed.
MAPS = 256
SHARD_BYTES = 1 << 30
# In the name of shards that hold only retractions: readers do not know their rank.
RETRACTING_RANK = 999


class ShardWriter:
    """Append records, compressed or not; one writer per rank, each with separate shards.

    They are numbered from `first_number` on; `on_closed` is given each shard that is complete.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        compress: bool = False,
        first_number: int = 0,
        shard_bytes: int = SHARD_BYTES,
        on_closed: Callable[[Path], None] | None = None,
    ) -> None:
        self.folder, self.rank, self.compress = folder, rank, compress
        self.shard_bytes, self.on_closed = shard_bytes, on_closed
        # A number is used once: a mirror may just be replacing a shard that this writer has closed.
        self.numbers = itertools.count(first_number)
        self.files: tuple[BinaryIO, BinaryIO] | None = None
        self.written: dict[str, int] = {}
        """Sizes of the shards and indexes that are closed."""
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, name: str, parts: KeyParts, tensors: Mapping[str, torch.Tensor]) -> RecordLocation:
        """Append one record. Raises EnvironmentNotReady when the disk is full."""
        record = serialize(tensors)
        return self._append(name, parts, compress_record(record) if self.compress else record)

    def write_broken(self, name: str, parts: KeyParts, reason: str) -> RecordLocation:
        # Otherwise it would be tried at every start.
        return self._append(name, parts, b"", {"broken": reason})

    def copy(self, location: RecordLocation, record: bytes) -> None:
        """Append a record of another shard as it is."""
        self._append(location.name, location.parts, record, {"broken": location.broken} if location.broken else None)

    def retract(self, location: RecordLocation) -> None:
        # Readers no longer find it, so it is made again.
        self._append(location.name, location.parts, b"", {"retracts": [location.shard.name, location.offset]})

    def _append(
        self, name: str, parts: KeyParts, blob: bytes, more: Mapping[str, object] | None = None
    ) -> RecordLocation:
        try:
            shard, index = self._files_with_room(len(blob))
            shard.write(bytes(-shard.tell() % ALIGNMENT_BYTES))  # torch.frombuffer needs aligned numbers
            line = {"name": name, "offset": shard.tell(), "length": len(blob), "parts": parts, **(more or {})}
            location = RecordLocation(Path(shard.name), shard.tell(), len(blob), name, parts, line.get("broken", ""))
            shard.write(blob)
            # Flushed before the line is written: a line must never name bytes buffered by a killed process.
            shard.flush()
            location = replace(location, checksum=location.checksum_with(blob))
            index.write(json.dumps({**line, "checksum": location.checksum}).encode() + b"\n")
            index.flush()
            return location
        except OSError as error:
            self._close_quietly()
            raise self._write_error(error) from None

    def _files_with_room(self, length: int) -> tuple[BinaryIO, BinaryIO]:
        """Return the open shard and its index, or the next ones when the shard is full."""
        if self.files is not None and self.files[0].tell() + length > self.shard_bytes:
            self.close()
        if self.files is None:
            shard = self._create_shard()
            index = index_of(Path(shard.name))
            index.unlink(missing_ok=True)  # of a shard that was deleted, or a link
            self.files = shard, index.open("xb")
        return self.files

    def _create_shard(self) -> BinaryIO:
        for number in self.numbers:
            with contextlib.suppress(FileExistsError):
                shard = (self.folder / shard_name(self.rank, number)).open("xb")
                with contextlib.suppress(OSError):  # a file system without locks
                    flock_without_waiting(shard.fileno())  # another run's mirror then leaves it to this one
                return shard
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Flush to the disk and close. Raises EnvironmentNotReady when the disk is full."""
        files = self.files or ()
        try:
            for file in files:
                file.flush()
                sync(file.fileno())
                self.written[Path(file.name).name] = file.tell()
        except OSError as error:
            raise self._write_error(error) from None
        finally:
            self._close_quietly()
        if files and self.on_closed is not None:
            self.on_closed(Path(files[0].name))

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

    def __init__(self, folder: Path, mirror: Mirror | None = None, sources: list[Source] | None = None) -> None:
        self.folder, self.mirror = folder, mirror
        self.index = open_index(folder, sources)
        self._verified = np.zeros(len(self.index.rows), bool)
        self._map = lru_cache(MAPS)(map_shard)
        if mirror is not None:
            mirror.stored.update(name for name, *_ in self.index.sources)

    def find(self, name: str, parts: KeyParts) -> RecordLocation | None:
        """Location of the record made from exactly these parts, or None."""
        row = int(self.index.find(record_keys([(name, parts)]))[0])
        return None if row < 0 else self.index.location(self.folder, row, name, parts)

    def records(self) -> Iterator[RecordLocation]:
        """Yield all records that can be found, by reading the shards' own indexes, which have their names."""
        for line in (entry.location for entry in read_indexes(self.folder)):
            location = self.find(line.name, line.parts)
            if location and (location.shard, location.offset) == (line.shard, line.offset):
                yield location

    def read(self, location: RecordLocation) -> dict[str, torch.Tensor]:
        """Return a record's tensors: views of the mapped shard unless it is compressed, so stacking is the
        only copy.

        Raises EnvironmentNotReady when the record is damaged; the next start makes it again.
        """
        try:
            record = self._record(location)
            is_known = location.row >= 0
            if not (is_known and self._verified[location.row]):  # once: then it is in memory
                if location.checksum != location.checksum_with(record):
                    raise ValueError("its checksum does not match")
                if is_known:
                    self._verified[location.row] = True
            return parse_tensors(decompress_record(record))
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise self._retract(location, error) from None

    def _retract(self, location: RecordLocation, error: Exception) -> EnvironmentNotReady:
        """Retract a damaged record, and return the error to raise.

        The run ends instead of computing the record again: by now the encoders are freed, and the other ranks
        train.
        """
        where = f"{location.shard} is damaged at byte {location.offset}, in the record {location.name}"
        message = f"the cache file {where}: {error}"
        try:
            number = self.mirror.random_number() if self.mirror else 0
            with ShardWriter(self.folder, RETRACTING_RANK, first_number=number) as writer:
                writer.retract(location)
        except EnvironmentNotReady:
            return EnvironmentNotReady(message, f"delete {location.shard}, and run the same command again")
        return EnvironmentNotReady(
            message, "run the same command again: it makes this record again, then resumes from the newest checkpoint"
        )

    def _record(self, location: RecordLocation) -> memoryview:
        if self.mirror is not None:
            return self.mirror.record(location)
        if location.row < 0:  # written since the index was read: its shard may grow beyond what is mapped
            return read_from_file(location)
        return self._map(location.shard)[location.offset : location.offset + location.length]


def read_from_file(location: RecordLocation) -> memoryview:
    """Copy a record into memory that may be written to; what the file does not have reads as zeros."""
    record = bytearray(location.length)
    with contextlib.suppress(OSError), location.shard.open("rb", buffering=0) as file:
        os.preadv(file.fileno(), [record], location.offset)
    return memoryview(record)


def map_shard(shard: Path) -> memoryview:
    """Map a shard privately: torch.frombuffer wants writable memory, and writing there must not change the
    cache.

    The map lives as long as any tensor in it, without a file descriptor, unlike mmap.mmap: a process may have
    only 1,024.
    """
    size = shard.stat().st_size  # raises OSError, where torch would raise RuntimeError
    return torch.from_file(str(shard), shared=False, size=size, dtype=torch.uint8).numpy().data


# Of runs that share a folder.
MOST_DIGESTS = 64


def read_note(reader: ShardReader, digest: str) -> dict[str, str] | None:
    """Reasons of failed records by name, if all others of these requests exist; None if unknown."""
    return read_digests(reader).get(digest)


def write_note(reader: ShardReader, digest: str, broken: dict[str, str]) -> None:
    """Note that all records of these requests exist, but broken ones. No-op in a read-only folder."""
    digests = [*read_digests(reader).items()][1 - MOST_DIGESTS :]
    note = with_checksum({"shards": identity(reader), "digests": dict([*digests, (digest, broken)])})
    with contextlib.suppress(OSError):
        write_file(reader.folder / COMPLETE, json.dumps(note).encode())


# The program's version is part of it, since another one may make other keys from the same dataset.
def identity(reader: ShardReader) -> str:
    return short_hash([__version__, reader.index.sources])


def read_digests(reader: ShardReader) -> dict[str, dict[str, str]]:
    """Digests of a note about just these shards; none where it is missing, damaged or about others."""
    path, note = reader.folder / COMPLETE, dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        note = json.loads(read_file(path)) if is_plain_file(path) else {}
    if not isinstance(note, dict) or not is_intact(note):
        return {}
    return note["digests"] if note["shards"] == identity(reader) else {}
