"""The index of one shard: a JSON line per record, appended after the record itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.caches.store.records import RecordLocation
from simpletuner.system.files.cache_files import INDEX_SUFFIX, is_plain_file, shard_of
from simpletuner.system.files.regular_files import open_regular

CHECKSUM = re.compile(r"xxh3:[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A line of an index: a record, or the (shard, offset) of one that it retracts."""

    location: RecordLocation
    retracts: tuple[str, int] | None = None


def read_indexes(folder: Path) -> Iterator[IndexEntry]:
    """Yield the lines of all indexes in a folder."""
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
    end = content.rfind(b"\n") + 1  # what follows the last newline is a torn line, or one that is being written
    return parse_lines(content[:end], shard_of(index)), start + end


def parse_lines(lines: bytes, shard: Path) -> Iterator[IndexEntry]:
    if not lines:
        return
    # After the lines were read: their records were written before them. Opening it makes NFS ask for the size.
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
    # A record's checksum is compared when it is read. A broken one has nothing to read, so its line is checked here.
    if location.broken and location.checksum != location.checksum_with(b""):
        raise ValueError("its checksum does not match")
    name, offset = line.get("retracts", (None, None))
    return IndexEntry(location, None if name is None else (str(name), int(offset)))
