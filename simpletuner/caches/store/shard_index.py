"""Indexes of shards: a JSON line per record, appended after the record; and a merged binary index of a cache
folder.

The shards' own indexes stay the truth: writers append to them, and the merged one is derived. Its rows are
sorted by key and memory-mapped, so a cache of a million records opens in milliseconds, and the ranks of a
machine share the memory. The header has the size and time of each source file, to detect that it is out of
date; a checksum covers all of it. If it is missing, damaged or out of date, it is merged again, reading only
new shards if the known ones are unchanged. In a read-only folder the result stays in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simpletuner.caches.store.records import RecordLocation, record_keys
from simpletuner.system.files.atomic import write_file
from simpletuner.system.files.cache_files import (
    INDEX_SUFFIX,
    MERGED_INDEX,
    SHARD_SUFFIX,
    index_of,
    is_plain_file,
    shard_of,
)
from simpletuner.system.files.regular_files import open_regular

CHECKSUM = re.compile(r"xxh3:[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A line of an index: a record, or the (shard, offset) of one that it retracts."""

    location: RecordLocation
    retracts: tuple[str, int] | None = None


def read_indexes(folder: Path) -> Iterator[IndexEntry]:
    for index in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        yield from read_index(index)


def read_index(index: Path) -> Iterator[IndexEntry]:
    """Yield the lines of an index that are complete and valid, and whose records are within their shard.

    Invalid lines are skipped without a word: their records are simply missing, and made again.
    """
    return read_index_from(index, 0)[0]


def read_index_from(index: Path, start: int) -> tuple[Iterator[IndexEntry], int]:
    """Return the valid lines after the first `start` bytes, and where the next line will begin."""
    if not (is_plain_file(index) and is_plain_file(shard_of(index))):
        return iter(()), start
    with open_regular(index) as file:
        file.seek(start)
        content = file.read()
    end = content.rfind(b"\n") + 1  # a torn line may follow, or one that is being written
    return parse_lines(content[:end], shard_of(index)), start + end


def parse_lines(lines: bytes, shard: Path) -> Iterator[IndexEntry]:
    if not lines:
        return
    # After reading the lines: records are written before them. Opening it makes NFS ask for the size.
    with open_regular(shard) as file:
        size = os.fstat(file.fileno()).st_size
    for line in lines.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, AttributeError):
            entry = parse_index_line(json.loads(line), shard)
            if 0 <= entry.location.offset <= entry.location.offset + entry.location.length <= size:
                yield entry


def parse_index_line(line: Mapping[str, Any], shard: Path) -> IndexEntry:
    """Return an index line. Raises ValueError, KeyError or TypeError for an invalid one."""
    parts = {str(name): str(value) for name, value in line["parts"].items()}
    location = RecordLocation(
        shard,
        int(line["offset"]),
        int(line["length"]),
        str(line["name"]),
        parts,
        str(line.get("broken", "")),
        str(line["checksum"]),
    )
    if not CHECKSUM.fullmatch(location.checksum):
        raise ValueError("its checksum is none")
    # A record's checksum is compared on reading. A broken one has no content, so its line is checked here.
    if location.broken and location.checksum != location.checksum_with(b""):
        raise ValueError("its checksum does not match")
    name, offset = line.get("retracts", (None, None))
    return IndexEntry(location, None if name is None else (str(name), int(offset)))


FORMAT = 1
# Checksum of all that follows it (16), length of the JSON header (8).
PREFIX_BYTES = 24

ROW = np.dtype(
    [
        ("low", "<u8"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("checksum", "V16"),
        ("shard", "<u4"),
        ("reason", "<u4"),  # 0, or 1 + the number of the reason why the record is broken
    ]
)
Source = tuple[str, int, int, int]
"""A shard's name, the size and change time (ns) of its index, and the size of the shard."""


@dataclass(frozen=True)
class MergedIndex:
    """Rows sorted by key. `high` is the first half of the keys, (n,); of equal keys the last one is found."""

    sources: Sequence[Source] = ()
    reasons: Sequence[str] = ()
    retracted: Sequence[tuple[str, int]] = ()
    high: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, "<u8"))
    rows: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, ROW))

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row of each key (n, 2); -1 where there is none."""
        if not len(self.high):
            return np.full(len(keys), -1)
        found = np.searchsorted(self.high, keys[:, 0], side="right") - 1
        # Two keys with the same first half (odds of 3e-6 in ten million) would hide a record: it is missing.
        same = (found >= 0) & (self.high[found] == keys[:, 0]) & (self.rows["low"][found] == keys[:, 1])
        return np.where(same, found, -1)

    def reason(self, row: int) -> str:
        """Reason why a row's record could not be made; empty otherwise."""
        number = int(self.rows[row]["reason"])
        return self.reasons[number - 1] if number else ""

    def broken_among(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, str]]:
        """Yield the places of broken records among `rows`, and their reasons."""
        for place in np.flatnonzero((rows >= 0) & (self.rows["reason"][rows] > 0) if len(self.rows) else rows >= 0):
            yield int(place), self.reason(int(rows[place]))

    def location(self, folder: Path, row: int, name: str, parts: dict[str, str]) -> RecordLocation:
        """Return the location of a row; the index has only the hash of its name and parts."""
        values = self.rows[row]
        shard = folder / self.sources[values["shard"]][0]
        checksum = f"xxh3:{values['checksum'].tobytes().hex()}"
        offset, length = int(values["offset"]), int(values["length"])
        return RecordLocation(shard, offset, length, name, parts, self.reason(row), checksum, row)


def open_index(folder: Path, sources: list[Source] | None = None) -> MergedIndex:
    """Return the merged index of a cache folder, merging it first unless it is current.

    `sources` are those that another process has found, where a network file system may list others for a
    while.
    """
    sources, path = list_sources(folder) if sources is None else sources, folder / MERGED_INDEX
    old = MergedIndex()
    with contextlib.suppress(OSError, ValueError):
        old = load(path)
    if list(old.sources) == sources:
        return old
    merged = merge(folder, sources, old)
    with contextlib.suppress(OSError, ValueError):
        write_file(path, *encode(merged))
        return load(path)  # mapped, it shares its memory with other ranks
    return merged


def list_sources(folder: Path, named: Iterable[str] = ()) -> list[Source]:
    """Return the shards that have an index; `named` are files that another machine has written and may not
    be listed yet. Raises OSError where one of those is missing."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:  # others, as rank 0's note, may be gone meanwhile
        sources = [entry for entry in entries if entry.name.endswith((SHARD_SUFFIX, INDEX_SUFFIX))]
        found = {entry.name: entry.stat() for entry in sources if entry.is_file(follow_symlinks=False)}
    found |= {name: (folder / name).lstat() for name in named}
    shards = sorted(name for name in found if name.endswith(SHARD_SUFFIX))
    indexes = {shard: found.get(shard.removesuffix(SHARD_SUFFIX) + INDEX_SUFFIX) for shard in shards}
    return [(name, s.st_size, s.st_mtime_ns, found[name].st_size) for name, s in indexes.items() if s is not None]


def merge(folder: Path, sources: list[Source], old: MergedIndex) -> MergedIndex:
    """Index of `sources`. Rows of `old` are taken over if all that it was made from is still there."""
    # A shard was removed or rewritten: its rows may be gone, so all indexes are read again.
    if not set(old.sources) <= set(sources):
        old = MergedIndex()
    new = {name for name, *_ in sources} - {name for name, *_ in old.sources}
    return extend(old, sources, {name: list(read_index(index_of(folder / name))) for name in sorted(new)})


def extend(old: MergedIndex, sources: list[Source], new: Mapping[str, Sequence[IndexEntry]]) -> MergedIndex:
    """Return an index of `sources` with the rows of `old` and, by shard, new lines."""
    numbers = {source[0]: number for number, source in enumerate(sources)}
    kept = old.rows.copy()
    kept["shard"] = np.array([numbers[source[0]] for source in old.sources] or [0], "<u4")[old.rows["shard"]]
    reasons = {reason: number for number, reason in enumerate(old.reasons, 1)}
    retracted = [*old.retracted]
    parts = [(old.high, kept)]
    for name, entries in new.items():
        retracted += [each.retracts for each in entries if each.retracts]
        parts.append(rows_of([each for each in entries if not each.retracts], numbers[name], reasons))
    high, rows = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    whole = ~is_among(rows, [(numbers.get(name, -1), offset) for name, offset in retracted])
    high, rows = high[whole], rows[whole]
    order = np.lexsort((rows["shard"], rows["low"], high))  # stable: a shard's last record stays last
    return MergedIndex(sources, list(reasons), retracted, high[order], rows[order])


def rows_of(
    entries: Sequence[IndexEntry], shard: int, reasons: dict[str, int]
) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
    """Return the first half of the keys, and the rows, of one shard's records; adds to `reasons`."""
    places = [each.location for each in entries]
    keys = record_keys((place.name, place.parts) for place in places)
    rows = np.zeros(len(places), ROW)
    rows["low"], rows["shard"] = keys[:, 1], shard
    rows["offset"] = [place.offset for place in places]
    rows["length"] = [place.length for place in places]
    digests = [bytes.fromhex(place.checksum.removeprefix("xxh3:")).ljust(16, b"\0") for place in places]
    rows["checksum"] = np.frombuffer(b"".join(digests), "V16")
    rows["reason"] = [reasons.setdefault(place.broken, len(reasons) + 1) if place.broken else 0 for place in places]
    return keys[:, 0], rows


def is_among(rows: NDArray[np.void], places: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Mask of rows at one of these (shard number, offset)."""
    found = np.zeros(len(rows), bool)
    for shard, offset in places:
        found |= (rows["shard"] == shard) & (rows["offset"] == offset)
    return found


def encode(index: MergedIndex) -> Iterable[bytes | memoryview]:
    """Return the content of the file, in pieces."""
    import xxhash

    texts = {"sources": index.sources, "reasons": index.reasons, "retracted": index.retracted}
    header = json.dumps({"format": FORMAT, **texts}).encode()
    header += b" " * (-len(header) % 8)  # numbers are aligned
    pieces = [len(header).to_bytes(8, "little"), header, index.high.data, index.rows.data]
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return [digest.digest(), *pieces]


def load(path: Path) -> MergedIndex:
    """Map a merged index. Raises ValueError if it is damaged or of another format, OSError if missing."""
    import xxhash

    if not is_plain_file(path):  # opening a FIFO would block
        raise FileNotFoundError(path)
    with open_regular(path) as file:
        content = np.asarray(np.memmap(file, np.uint8, "r"))  # a memmap takes ten times as long to index
    if content[:16].tobytes() != xxhash.xxh3_128_digest(content[16:].data):
        raise ValueError("its checksum does not match")
    start = PREFIX_BYTES + int(content[16:PREFIX_BYTES].view("<u8")[0])
    header = json.loads(content[PREFIX_BYTES:start].tobytes())
    if header["format"] != FORMAT:
        raise ValueError("it is of another version")
    middle = start + (len(content) - start) // (8 + ROW.itemsize) * 8
    sources = [(str(name), int(size), int(time), int(shard)) for name, size, time, shard in header["sources"]]
    retracted = [(str(name), int(offset)) for name, offset in header["retracted"]]
    return MergedIndex(
        sources, header["reasons"], retracted, content[start:middle].view("<u8"), content[middle:].view(ROW)
    )
