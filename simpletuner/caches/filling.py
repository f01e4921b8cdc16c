"""Make what is missing in a cache, on all ranks at once: they take chunks from one queue and write their own shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.caches.keys import Parts, short_hash
from simpletuner.caches.shards import ShardReader, ShardWriter

if TYPE_CHECKING:
    from torch import Tensor

    from simpletuner.parallel.world import World
    from simpletuner.report import Report


@dataclass(frozen=True)
class Wanted:
    """A record to have: its name, what it depends on, and the group within which records are made together."""

    name: str
    parts: Parts
    group: str = ""


@dataclass(frozen=True)
class Job:
    """A cache to fill: its title, folder, chunk size, and `make`, which computes the records of one chunk: for each its
    tensors, or why there are none."""

    title: str
    folder: Path
    chunk: int
    make: Callable[[Sequence[Wanted]], Iterable[tuple[Wanted, Mapping[str, Tensor] | str]]]


def chunks_of(wanted: Iterable[Wanted], size: int) -> Iterator[list[Wanted]]:
    """Yield lists of at most `size` records of one group each."""
    groups: dict[str, list[Wanted]] = {}
    for item in wanted:
        groups.setdefault(item.group, []).append(item)
    for items in groups.values():
        for start in range(0, len(items), size):
            yield items[start : start + size]


def fill(job: Job, wanted: Sequence[Wanted], world: World, report: Report, stop: Callable[[], None]) -> ShardReader:
    """Make the missing records and return a reader that has them all; `stop` raises when the run is to end.

    A chunk is computed whole, even where only some of its records are missing: an encoder's answer depends in its last
    bits on the batch, so only then does an interrupted run end with the same records as an undisturbed one.
    """
    reader = ShardReader(job.folder)
    absent = [item for item in wanted if reader.find(item.name, item.parts) is None]
    if not absent:
        return reader
    explain(job, reader, absent, len(wanted), report)
    world.activity.begin(f"making {job.title}")
    missing = {item.name for item in absent}
    chunks = [chunk for chunk in chunks_of(wanted, job.chunk) if any(item.name in missing for item in chunk)]
    queue = short_hash([job.folder, [item.name for item in absent]])
    world.store_barrier(f"{queue}/read", stop)  # all see the same queue only if none writes before all have read
    with report.progress(job.title, len(absent)) as progress, ShardWriter(job.folder, world.rank) as writer:
        while (ticket := world.next_chunk(queue)) < len(chunks):
            stop()
            made = [(item, result) for item, result in job.make(chunks[ticket]) if item.name in missing]
            for item, result in made:
                write(writer, item, result)
            progress.update(world.add_progress(queue, len(made)))
        world.wait_for_count(queue, len(absent), stop, progress.update)
    return ShardReader(job.folder)


def write(writer: ShardWriter, item: Wanted, result: Mapping[str, Tensor] | str) -> None:
    """Write one record, or why it could not be made."""
    if isinstance(result, str):
        writer.write_broken(item.name, item.parts, result)
    else:
        writer.write(item.name, item.parts, result)


def explain(job: Job, reader: ShardReader, absent: Sequence[Wanted], total: int, report: Report) -> None:
    """Say how much is made, and which parts changed where older records were found."""
    changed: dict[str, int] = {}
    for item in absent:
        for part in reader.why_missing(item.name, item.parts):
            changed[part] = changed.get(part, 0) + 1
    why = ", ".join(f"{part} changed for {count}" for part, count in changed.items())
    report.say(f"{job.title}: making {len(absent)} of {total}{' (' + why + ')' if why else ''}")
