"""Make missing records: chunks from one queue of all ranks, items loaded by threads while earlier ones are encoded.

A chunk that a rank has taken and not written when it ends is made at the next start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simpletuner.caches.fill.jobs import CacheJob, CacheRequest, Item, Loaded, Made
from simpletuner.caches.store.records import RecordLocation
from simpletuner.caches.store.shards import ShardWriter

if TYPE_CHECKING:
    from simpletuner.parallel.world import World
    from simpletuner.report import Report

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
    """Yield this rank's chunks with what was loaded of them; as many more as keep all threads busy load meanwhile."""
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
    """Return the positions of each chunk in which a record is missing.

    A chunk is computed whole, even where only some of its records are missing: an encoder's output depends in its last
    bits on the batch, so only then does an interrupted run end with the same records as an undisturbed one.
    """
    chunks = split_into_chunks((each.group for each in job.requests()), job.chunk)
    return [chunk for chunk in chunks if missing[chunk].any()]


def split_into_chunks(groups: Iterable[str], size: int) -> Iterator[Chunk]:
    """Yield the positions of at most `size` equal groups each, group by group in the order of their first members."""
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
