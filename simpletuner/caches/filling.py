"""Compute what is missing in a cache on all ranks at once: they take chunks from one queue and write their own shards.

No collective is held open meanwhile: a chunk may take minutes on one rank, and NCCL gives up after ten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.caches.keys import KeyParts, short_hash
from simpletuner.caches.shards import ShardReader, ShardWriter

if TYPE_CHECKING:
    from torch import Tensor

    from simpletuner.parallel.world import World
    from simpletuner.report import Report


@dataclass(frozen=True)
class CacheRequest:
    """A record that a run needs: its name, what it depends on, and the group within which records share a batch."""

    name: str
    parts: KeyParts
    group: str = ""


@dataclass(frozen=True)
class CacheJob:
    """A cache to fill. `make` computes the records of one chunk: for each its tensors, or why there are none."""

    title: str
    folder: Path
    chunk: int
    make: Callable[[Sequence[CacheRequest]], Iterable[tuple[CacheRequest, Mapping[str, Tensor] | str]]]


def split_into_chunks(requests: Iterable[CacheRequest], size: int) -> Iterator[list[CacheRequest]]:
    """Yield lists of at most `size` requests of one group each."""
    groups: dict[str, list[CacheRequest]] = {}
    for request in requests:
        groups.setdefault(request.group, []).append(request)
    for members in groups.values():
        for start in range(0, len(members), size):
            yield members[start : start + size]


def fill_cache(
    job: CacheJob, requests: Sequence[CacheRequest], world: World, report: Report, stop: Callable[[], None]
) -> ShardReader:
    """Compute the missing records and return a reader that has all of them; `stop` raises when the run is to end."""
    reader = ShardReader(job.folder)
    absent = [request for request in requests if reader.find(request.name, request.parts) is None]
    if not absent:
        return reader
    report_missing(job, reader, absent, len(requests), report)
    world.activity.begin(f"making {job.title}")
    missing = {request.name for request in absent}
    # A chunk is computed whole, even where only some of its records are missing: an encoder's output depends in its
    # last bits on the batch, so only then does an interrupted run end with the same records as an undisturbed one.
    chunks = [chunk for chunk in split_into_chunks(requests, job.chunk) if any(each.name in missing for each in chunk)]
    queue = short_hash([job.folder, [request.name for request in absent]])
    world.store_barrier(f"{queue}/read", stop)  # all see the same queue only if none writes before all have read
    with report.progress(job.title, len(absent)) as progress, ShardWriter(job.folder, world.rank) as writer:
        while (ticket := world.next_chunk(queue)) < len(chunks):
            stop()
            made = [(request, result) for request, result in job.make(chunks[ticket]) if request.name in missing]
            for request, result in made:
                write_result(writer, request, result)
            progress.update(world.add_progress(queue, len(made)))
        world.wait_for_count(queue, len(absent), stop, progress.update)
    return ShardReader(job.folder)


def write_result(writer: ShardWriter, request: CacheRequest, result: Mapping[str, Tensor] | str) -> None:
    if isinstance(result, str):
        writer.write_broken(request.name, request.parts, result)
    else:
        writer.write(request.name, request.parts, result)


def report_missing(
    job: CacheJob, reader: ShardReader, absent: Sequence[CacheRequest], total: int, report: Report
) -> None:
    """Say how much is computed, and which parts of the key changed where older records were found."""
    changed: dict[str, int] = {}
    for request in absent:
        for part in reader.why_missing(request.name, request.parts):
            changed[part] = changed.get(part, 0) + 1
    why = ", ".join(f"{part} changed for {count}" for part, count in changed.items())
    report.say(f"{job.title}: making {len(absent)} of {total}{' (' + why + ')' if why else ''}")
