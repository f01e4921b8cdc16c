"""Make missing records: chunks from one queue of all ranks, items loaded by threads while earlier ones are
encoded.

A chunk that a rank has taken and not written when it ends is made at the next start. During training each
rank reads the lines that the others append to their indexes, so it need not repeat their work. If NFS shows
them late, a record is made twice, with the same content.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from simpletuner.caches.store.records import KeyParts, RecordLocation, record_keys
from simpletuner.caches.store.shard_index import IndexEntry, MergedIndex, extend, read_index_from
from simpletuner.caches.store.shards import ShardWriter
from simpletuner.system.files.cache_files import INDEX_SUFFIX, index_of

if TYPE_CHECKING:
    from torch import Tensor

    from simpletuner.caches.store.mirror import Mirror
    from simpletuner.parallel.world import World
    from simpletuner.report import Report

# A listing of 10,000 shards takes 5 ms.
REFRESH_SECONDS = 1.0
# Records to wait for before a merge: number, or share. A row takes 64 bytes, a location 800.
MERGED_AT, MERGED_SHARE = 4096, 16


class RecentRecords:
    """Records of a folder that are not in `known`, the index read when it was opened. For one thread."""

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
        # Merging copies all rows, so it waits for a share of new ones: the cost per record stays constant.
        if len(self.waiting) >= max(MERGED_AT, len(self.merged.rows) // MERGED_SHARE):
            self._merge()

    def _merge(self) -> None:
        new: dict[str, list[IndexEntry]] = defaultdict(list)
        for location in self.waiting.values():
            new[location.shard.name].append(IndexEntry(location))
        others = [(name, 0, 0, 0) for name in new if name not in {known for known, *_ in self.merged.sources}]
        self.merged = extend(self.merged, [*self.merged.sources, *others], new)
        self.waiting.clear()


Item = TypeVar("Item")
Loaded = TypeVar("Loaded")
Made = Mapping[str, "Tensor"] | str
"""A record's tensors, or why there are none."""


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """Request for a record: name, key parts, and the group that may share a batch."""

    name: str
    parts: KeyParts
    group: str = ""


@dataclass(frozen=True)
class CacheJob(Generic[Item, Loaded]):
    """A cache to fill with the records of `items`, which may be many more than fit into memory as requests.

    `digest` hashes all requests, so that a complete cache need not look at any. `load` reads one item, in up
    to `threads` threads ahead of the encoder. `make` computes one chunk of loaded items, and returns the
    tensors to write for each.
    """

    title: str
    folder: Path
    digest: Callable[[], str]
    chunk: int
    items: Callable[[], Sequence[Item]]
    request: Callable[[Item], CacheRequest]
    load: Callable[[Item], Loaded]
    make: Callable[[Sequence[Loaded]], Iterable[Made]]
    threads: int = 1
    compress: bool = False
    mirror: Mirror | None = None
    """The bucket that the folder is kept equal to, if there is one."""

    def requests(self) -> Iterator[CacheRequest]:
        return map(self.request, self.items())

    def request_at(self, position: np.intp) -> CacheRequest:
        return self.request(self.items()[int(position)])


Chunk = NDArray[np.int64]
"""Positions of items that are encoded together."""


def make_missing(
    job: CacheJob[Item, Loaded],
    missing: NDArray[np.bool_],
    place: str,
    world: World,
    report: Report,
    stop: Callable[[], None],
) -> dict[str, int]:
    """Take chunks and write what is missing of them, until all ranks together have written all of it.

    Return the files that this rank has written, with their sizes.
    """
    world.activity.begin(f"encoding {job.title}")
    chunks, count = chunks_to_make(job, missing), int(missing.sum())
    with report.progress(f"encoding {job.title}", count) as progress:
        with open_writer(job, world.rank) as writer:
            for positions, loaded in load_ahead(job, chunks, place, world, stop):
                made = zip(positions, job.make(loaded), strict=True)
                wanted = [(job.request_at(position), result) for position, result in made if missing[position]]
                for request, result in wanted:
                    write_result(writer, request, result)
                progress.update(world.add_progress(place, len(wanted)))
        world.wait_for_count(place, count, stop, progress.update)
    return writer.written


def open_writer(job: CacheJob[Item, Loaded], rank: int) -> AbstractContextManager[ShardWriter]:
    return job.mirror.writer(rank, job.compress) if job.mirror else ShardWriter(job.folder, rank, job.compress)


def load_ahead(
    job: CacheJob[Item, Loaded], chunks: Sequence[Chunk], place: str, world: World, stop: Callable[[], None]
) -> Iterator[tuple[Chunk, list[Loaded]]]:
    """Yield this rank's chunks with loaded items, loading ahead as many as keep all threads busy."""
    # No more than an equal share: of a short queue the other ranks would get nothing.
    ahead = min(-(-job.threads // job.chunk), len(chunks) // world.size)
    with ThreadPoolExecutor(job.threads, thread_name_prefix="load") as pool:
        waiting: deque[tuple[Chunk, list[Future[Loaded]]]] = deque()
        try:
            while True:
                stop()
                while len(waiting) <= ahead and (ticket := world.next_chunk(place)) < len(chunks):
                    items = [job.items()[int(position)] for position in chunks[ticket]]
                    waiting.append((chunks[ticket], [pool.submit(job.load, item) for item in items]))
                if not waiting:
                    return
                positions, loading = waiting.popleft()
                yield positions, [each.result() for each in loading]
        finally:  # a rank that ends must not read what it will not encode
            for future in (future for _, loading in waiting for future in loading):
                future.cancel()


def chunks_to_make(job: CacheJob[Item, Loaded], missing: NDArray[np.bool_]) -> list[Chunk]:
    """Positions of each chunk with a missing record.

    A chunk is computed whole, even where only some of its records are missing: an encoder's output depends in
    its last bits on the batch, so only then does an interrupted run end with the same records as an
    undisturbed one.
    """
    chunks = split_into_chunks((each.group for each in job.requests()), job.chunk)
    return [chunk for chunk in chunks if missing[chunk].any()]


def split_into_chunks(groups: Iterable[str], size: int) -> Iterator[Chunk]:
    """Yield the positions of at most `size` equal groups each, group by group in order of first members."""
    numbers: dict[str, int] = {}
    codes = np.fromiter((numbers.setdefault(group, len(numbers)) for group in groups), np.int32)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes))
    for start, end in zip(ends - np.bincount(codes), ends, strict=True):
        for first in range(start, end, size):
            yield order[first : min(first + size, end)]


def write_result(writer: ShardWriter, request: CacheRequest, result: Made) -> RecordLocation:
    if isinstance(result, str):
        return writer.write_broken(request.name, request.parts, result)
    return writer.write(request.name, request.parts, result)
