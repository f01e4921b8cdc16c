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

from simpletuner.caches.records import RecordLocation
from simpletuner.system.cache_files import INDEX_SUFFIX, is_plain_file, shard_of

CHECKSUM = re.compile(r"(xxh3:[0-9a-f]{32})?")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of an index: a record, or the (shard, offset) of one that it retracts."""

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
    shard = shard_of(index)
    if not (is_plain_file(index) and is_plain_file(shard)):
        return
    with shard.open("rb") as file:  # opening it makes NFS ask the server for the size
        size = os.fstat(file.fileno()).st_size
    for line in index.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is a torn line
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
        str(line.get("checksum", "")),
    )
    if not CHECKSUM.fullmatch(location.checksum):
        raise ValueError("its checksum is none")
    # A record's checksum is compared when it is read. A broken one has nothing to read, so its line is checked here.
    if location.broken and location.checksum and location.checksum != location.checksum_with(b""):
        raise ValueError("its checksum does not match")
    name, offset = line.get("retracts", (None, None))
    return IndexEntry(location, None if name is None else (str(name), int(offset)))
