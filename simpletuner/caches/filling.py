"""Compute what is missing in a cache on all ranks at once: they take chunks from one queue and write their own shards.

No collective is held open meanwhile: a chunk may take minutes on one rank, and NCCL gives up after ten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from simpletuner.caches.keys import KeyParts, changed_parts, short_hash
from simpletuner.caches.records import record_keys
from simpletuner.caches.shard_index import read_indexes
from simpletuner.caches.shards import ShardReader, ShardWriter

if TYPE_CHECKING:
    from torch import Tensor

    from simpletuner.parallel.world import World
    from simpletuner.report import Report

BLOCK = 1 << 14
"""How many requests are looked up at once."""

Item = TypeVar("Item")
Made = Mapping[str, "Tensor"] | str
"""A record's tensors, or why there are none."""


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """A record that a run needs: its name, what it depends on, and the group within which records share a batch."""

    name: str
    parts: KeyParts
    group: str = ""


@dataclass(frozen=True)
class CacheJob(Generic[Item]):
    """A cache to fill with the records of `items`, which may be many more than fit into memory as requests.

    `make` computes one chunk: for each item what there is to write.
    """

    title: str
    folder: Path
    chunk: int
    items: Sequence[Item]
    request: Callable[[Item], CacheRequest]
    make: Callable[[Sequence[Item]], Iterable[Made]]

    def requests(self) -> Iterator[CacheRequest]:
        return map(self.request, self.items)

    def request_at(self, position: np.intp) -> CacheRequest:
        return self.request(self.items[int(position)])


def fill_cache(
    job: CacheJob[Item], world: World, report: Report, stop: Callable[[], None]
) -> tuple[ShardReader, dict[str, str]]:
    """Compute the missing records; `stop` raises when the run is to end.

    Return a reader that has all records, and by name why some of them could not be made.
    """
    first = job.request(job.items[0]).name if job.items else ""
    place = short_hash([job.folder, job.title, len(job.items), first])
    reader = open_on_all_ranks(job.folder, f"{place}/open", world, stop)
    missing, broken = look_up(reader, job.requests())
    if not missing.any():
        return reader, broken
    if world.is_first:
        report_missing(job, missing, report)
    world.store_barrier(f"{place}/read", stop)  # all see the same queue only if none writes before all have read
    make_missing(job, missing, place, world, report, stop)
    reader = open_on_all_ranks(job.folder, f"{place}/filled", world, stop)
    left, new_broken = look_up(reader, (job.request_at(position) for position in np.flatnonzero(missing)))
    assert not left.any(), f"{left.sum()} records are not in {job.folder} after filling it"
    return reader, broken | new_broken


def open_on_all_ranks(folder: Path, place: str, world: World, stop: Callable[[], None]) -> ShardReader:
    """Open a cache once all ranks have closed what they wrote. The first one merges its indexes for the others."""
    world.store_barrier(f"{place}/closed", stop)
    reader = ShardReader(folder) if world.is_first else None
    world.store_barrier(f"{place}/merged", stop)
    return reader or ShardReader(folder)


def look_up(reader: ShardReader, requests: Iterable[CacheRequest]) -> tuple[NDArray[np.bool_], dict[str, str]]:
    """Return which requests have no record, and by name why the record of others could not be made."""
    remaining, missing = iter(requests), [np.zeros(0, bool)]
    broken: dict[str, str] = {}
    while block := list(islice(remaining, BLOCK)):
        rows = reader.index.find(record_keys((each.name, each.parts) for each in block))
        missing.append(rows < 0)
        broken |= {block[place].name: reason for place, reason in reader.index.broken_among(rows)}
    return np.concatenate(missing), broken


def make_missing(
    job: CacheJob[Item],
    missing: NDArray[np.bool_],
    place: str,
    world: World,
    report: Report,
    stop: Callable[[], None],
) -> None:
    """Take chunks and write what is missing of them, until all ranks together have written all of it."""
    world.activity.begin(f"making {job.title}")
    chunks, count = chunks_to_make(job, missing), int(missing.sum())
    with report.progress(job.title, count) as progress:
        with ShardWriter(job.folder, world.rank) as writer:
            while (ticket := world.next_chunk(place)) < len(chunks):
                stop()
                positions = chunks[ticket]
                items = [job.items[int(position)] for position in positions]
                made = zip(positions, items, job.make(items), strict=True)
                wanted = [(job.request(item), result) for position, item, result in made if missing[position]]
                for request, result in wanted:
                    write_result(writer, request, result)
                progress.update(world.add_progress(place, len(wanted)))
        world.wait_for_count(place, count, stop, progress.update)


def chunks_to_make(job: CacheJob[Item], missing: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Return the positions of each chunk in which a record is missing.

    A chunk is computed whole, even where only some of its records are missing: an encoder's output depends in its last
    bits on the batch, so only then does an interrupted run end with the same records as an undisturbed one.
    """
    chunks = split_into_chunks((each.group for each in job.requests()), job.chunk)
    return [chunk for chunk in chunks if missing[chunk].any()]


def split_into_chunks(groups: Iterable[str], size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of at most `size` equal groups each, group by group in the order of their first members."""
    numbers: dict[str, int] = {}
    codes = np.fromiter((numbers.setdefault(group, len(numbers)) for group in groups), np.int32)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes))
    for start, end in zip(ends - np.bincount(codes), ends, strict=True):
        for first in range(start, end, size):
            yield order[first : min(first + size, end)]


def write_result(writer: ShardWriter, request: CacheRequest, result: Made) -> None:
    if isinstance(result, str):
        writer.write_broken(request.name, request.parts, result)
    else:
        writer.write(request.name, request.parts, result)


def report_missing(job: CacheJob[Item], missing: NDArray[np.bool_], report: Report) -> None:
    """Say how much is computed, and which parts of the key changed where older records were found."""
    positions = {job.request_at(position).name: position for position in np.flatnonzero(missing)}
    nearest = why_missing(job.folder, positions.keys(), lambda name: job.request_at(positions[name]).parts)
    changed = Counter(part for parts in nearest.values() for part in parts)
    why = ", ".join(f"{part} changed for {count}" for part, count in changed.items())
    report.say(f"{job.title}: making {len(positions)} of {len(missing)}{' (' + why + ')' if why else ''}")


def why_missing(folder: Path, names: Iterable[str], parts_of: Callable[[str], KeyParts]) -> dict[str, list[str]]:
    """Return for each name of which there is a record in which parts the nearest one differs.

    Reads the shards' own indexes: the merged one has only hashes.
    """
    wanted, nearest = set(names), {}
    for location in (entry.location for entry in read_indexes(folder)):
        if location.name in wanted:
            changed = changed_parts(location.parts, parts_of(location.name))
            nearest[location.name] = min(nearest.get(location.name, changed), changed, key=len)
    return nearest
