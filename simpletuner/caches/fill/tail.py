"""Records that the ranks of a run have added to a cache folder since its index was read.

Each rank reads the lines that the others append to their indexes, so it need not make what they have made. Where NFS
shows them late, a record is made twice, with the same content.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from simpletuner.caches.store.keys import KeyParts
from simpletuner.caches.store.merged_index import MergedIndex, extend
from simpletuner.caches.store.records import RecordLocation, record_keys
from simpletuner.caches.store.shard_index import IndexEntry, read_index_from
from simpletuner.system.files.cache_files import INDEX_SUFFIX, index_of

# A listing of 10,000 shards takes 5 ms.
REFRESH_SECONDS = 1.0
MERGED_AT, MERGED_SHARE = 4096, 16
"""Waiting records that trigger a merge: a number, or a share of those merged. A row takes 64 bytes, a location 800."""


class RecentRecords:
    """Records of a folder that are not in `known`, the index that was read when it was opened. For one thread."""

    def __init__(self, folder: Path, known: MergedIndex) -> None:
        self.folder = folder
        self.not_read = {index_of(Path(name)).name for name, *_ in known.sources}
        self.read_bytes: dict[str, int] = defaultdict(int)
        self.refreshed_at = -REFRESH_SECONDS
        self.waiting: dict[bytes, RecordLocation] = {}
        self.merged = MergedIndex()

    def add_own(self, location: RecordLocation) -> None:
        self.not_read.add(index_of(location.shard).name)
        self._add([location])

    def refresh(self) -> None:
        """Read what other writers have appended, at most once in REFRESH_SECONDS."""
        if time.monotonic() - self.refreshed_at < REFRESH_SECONDS:
            return
        self.refreshed_at = time.monotonic()
        for index in self.folder.glob(f"*{INDEX_SUFFIX}"):
            if index.name not in self.not_read:
                entries, self.read_bytes[index.name] = read_index_from(index, self.read_bytes[index.name])
                self._add(entry.location for entry in entries if not entry.retracts)

    def find(self, name: str, parts: KeyParts) -> RecordLocation | None:
        key = record_keys([(name, parts)])
        if found := self.waiting.get(key.tobytes()):
            return found
        row = int(self.merged.find(key)[0])
        # Without its row: a reader has other rows.
        return None if row < 0 else replace(self.merged.location(self.folder, row, name, parts), row=-1)

    def _add(self, locations: Iterable[RecordLocation]) -> None:
        self.waiting |= {record_keys([(each.name, each.parts)]).tobytes(): each for each in locations}
        # Merging copies all rows, so it is done when a share of them is new: the cost per record stays
        # constant.
        if len(self.waiting) >= max(MERGED_AT, len(self.merged.rows) // MERGED_SHARE):
            self._merge()

    def _merge(self) -> None:
        new: dict[str, list[IndexEntry]] = defaultdict(list)
        for location in self.waiting.values():
            new[location.shard.name].append(IndexEntry(location))
        others = [(name, 0, 0, 0) for name in new if name not in {known for known, *_ in self.merged.sources}]
        self.merged = extend(self.merged, [*self.merged.sources, *others], new)
        self.waiting.clear()
