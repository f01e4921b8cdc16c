"""Records of a cache: made on all ranks before training, at their first use, or at each use.

Before training, ranks take chunks from one queue and write their own shards. No collective is held open: a
chunk may take minutes on one rank, and NCCL gives up after ten.

During training each record is made by itself, since an encoder's output depends in its last bits on the
batch: it is the same at every step and on any number of ranks, and as in a cache with batch size 1.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal

import numpy as np
from numpy.typing import NDArray

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.store.records import KeyParts, RecordLocation, changed_parts, record_keys, short_hash
from simpletuner.caches.store.shard_index import Source, list_sources, read_indexes
from simpletuner.caches.store.shards import ShardReader, ShardWriter, read_note, write_note
from simpletuner.caches.workers import (
    CacheJob,
    CacheRequest,
    Item,
    Loaded,
    Made,
    RecentRecords,
    make_missing,
    open_writer,
    write_result,
)
from simpletuner.errors import DataError
from simpletuner.system.files.cache_files import index_of
from simpletuner.system.files.late_files import wait_for_files

if TYPE_CHECKING:
    from torch import Tensor

    from simpletuner.parallel.world import World
    from simpletuner.report import Report

# Requests looked up at once.
BLOCK = 1 << 14
MAX_COMPARED = 1000
"""Records of another dataset's folder that are compared by their names."""


def fill_cache(
    job: CacheJob[Item, Loaded], world: World, report: Report, stop: Callable[[], None]
) -> tuple[ShardReader, dict[str, str]]:
    """Compute the missing records; `stop` raises when the run is to end.

    Return a reader that has all records, and by name why some of them could not be made.
    """
    job, digest, place, reader, known = open_known(job, world, stop)
    if known is not None:
        return reader, known
    # Each rank looks up all: a few seconds of every rank at once, and the queue of chunks is the same on all
    # without being sent.
    missing, broken = look_up(reader, job.requests())
    if missing.any():
        reader, new_broken = fill_missing(job, missing, place, world, report, stop)
        broken |= new_broken
    if world.is_first:
        write_note(reader, digest, broken)
    return reader, broken


def open_known(
    job: CacheJob[Item, Loaded], world: World, stop: Callable[[], None]
) -> tuple[CacheJob[Item, Loaded], str, str, ShardReader, dict[str, str] | None]:
    """Collective: open a cache. Return its job, digest, place in the store, reader, and what an earlier start
    noted.

    The note says by name why records could not be made, once all others are there.
    """
    # Items are listed once, only if a record may be missing, and not kept: ten million captions take 0.9 GB.
    job, digest = replace(job, items=cache(job.items)), job.digest()
    place = short_hash([job.folder, job.title, digest])
    reader = open_on_all_ranks(job, f"{place}/open", world, stop)
    noted = world.from_first(f"{place}/known", lambda: json.dumps(read_note(reader, digest)), stop)
    return job, digest, place, reader, json.loads(noted)


def fill_missing(
    job: CacheJob[Item, Loaded],
    missing: NDArray[np.bool_],
    place: str,
    world: World,
    report: Report,
    stop: Callable[[], None],
) -> tuple[ShardReader, dict[str, str]]:
    """Compute the missing records; return a reader that has them, and why some could not be made."""
    if world.is_first:
        report_missing(job, missing, report)
    world.store_barrier(f"{place}/read", stop)  # all see the same queue only if none writes before
    written = make_missing(job, missing, place, world, report, stop)
    reader = open_on_all_ranks(job, f"{place}/filled", world, stop, written)
    left, broken = look_up(reader, (job.request_at(position) for position in np.flatnonzero(missing)))
    assert not left.any(), f"{left.sum()} records are not in {job.folder} after filling it"
    return reader, broken


def open_on_all_ranks(
    job: CacheJob[Item, Loaded],
    place: str,
    world: World,
    stop: Callable[[], None],
    written: Mapping[str, int] = MappingProxyType({}),
) -> ShardReader:
    """Open a cache once all ranks have closed what they wrote, `written`. The first one merges its indexes
    for the others, and tells them the shards: a network file system may list others to each machine
    (sshfs: for 20 s)."""
    world.store.set(f"{place}/written/{world.rank}", json.dumps(dict(written)))
    world.store_barrier(f"{place}/closed", stop)
    if world.is_first:
        texts = [world.store.get(f"{place}/written/{rank}") for rank in range(world.size)]
        named = {name: size for text in texts for name, size in json.loads(text).items()}
        wait_for_files(job.folder, named, stop)
        if job.mirror:
            job.mirror.synchronize(stop, named)
        reader = ShardReader(job.folder, job.mirror, list_sources(job.folder, named))
        world.store.set(f"{place}/sources", json.dumps(reader.index.sources))
        world.store_barrier(f"{place}/merged", stop)
        return reader
    world.store_barrier(f"{place}/merged", stop)
    sources: list[Source] = [tuple(each) for each in json.loads(world.store.get(f"{place}/sources"))]
    sizes = {name: size for name, _, _, size in sources}
    wait_for_files(job.folder, sizes | {index_of(Path(name)).name: size for name, size, *_ in sources}, stop)
    return ShardReader(job.folder, job.mirror, sources)


def look_up(reader: ShardReader, requests: Iterable[CacheRequest]) -> tuple[NDArray[np.bool_], dict[str, str]]:
    """Mask of requests without a record, and the reasons by name for those that could not be made."""
    remaining, missing = iter(requests), [np.zeros(0, bool)]
    broken: dict[str, str] = {}
    while block := list(islice(remaining, BLOCK)):
        rows = reader.index.find(record_keys((each.name, each.parts) for each in block))
        missing.append(rows < 0)
        broken |= {block[place].name: reason for place, reason in reader.index.broken_among(rows)}
    return np.concatenate(missing), broken


def report_missing(job: CacheJob[Item, Loaded], missing: NDArray[np.bool_], report: Report) -> None:
    """Report the amount to compute, and the changed parts of the key if older records were found."""
    positions = {job.request_at(position).name: position for position in np.flatnonzero(missing)}
    nearest = why_missing(job.folder, positions.keys(), lambda name: job.request_at(positions[name]).parts)
    changed = Counter(part for parts in nearest.values() for part in parts)
    why = ", ".join(f"{part} changed for {count}" for part, count in changed.items())
    if not nearest and (found := folder_before_renaming(job.folder, positions.keys())):
        why = f"a dataset `{found}` has cached images of these names: one with this id in a dataset file takes them"
    share = f" of {len(missing):,}" if len(positions) < len(missing) else ""
    report.say(f"encoding {len(positions):,}{share} {job.title}{' (' + why + ')' if why else ''}")


def folder_before_renaming(folder: Path, names: Collection[str]) -> str:
    """Return the name of a folder beside this one whose records have the names of these, but for the
    dataset's id.

    Without a dataset file that id is the name of the folder of images, which may have been renamed.
    """
    if not folder.parent.is_dir():
        return ""
    for other in sorted(folder.parent.iterdir()):
        if other != folder and other.is_dir():
            found = [entry.location.name for entry in islice(read_indexes(other), MAX_COMPARED)]
            same = sum(f"{folder.name}/{name.removeprefix(f'{other.name}/')}" in names for name in found)
            if found and 2 * same > len(found):
                return other.name
    return ""


def why_missing(folder: Path, names: Iterable[str], parts_of: Callable[[str], KeyParts]) -> dict[str, list[str]]:
    """Parts of the key that differ in the nearest record, for each name with a record.

    Reads the shards' own indexes: the merged one has only hashes.
    """
    wanted, nearest = set(names), {}
    for location in (entry.location for entry in read_indexes(folder)):
        if location.name in wanted:
            changed = changed_parts(location.parts, parts_of(location.name))
            nearest[location.name] = min(nearest.get(location.name, changed), changed, key=len)
    return nearest


# Threads that need the same record wait for one of them to make it; others rarely do.
LOCKS = 64


class WriteThroughCache(Generic[Item, Loaded]):
    """Read the records of a job's items, from any thread; `writer` stores those that were missing."""

    def __init__(self, job: CacheJob[Item, Loaded], reader: ShardReader, writer: ShardWriter) -> None:
        self.job, self.reader, self.writer = job, reader, writer
        self.recent = RecentRecords(job.folder, reader.index)
        self._lock = threading.Lock()
        self._making = [threading.Lock() for _ in range(LOCKS)]

    def read(self, item: Item) -> Made:
        """Item's tensors, or why they cannot be made. Raises EnvironmentNotReady when the disk is full."""
        request = self.job.request(item)
        location = self._find(request) or self._make(request, item)
        return location.broken or self.reader.read(location)

    def _find(self, request: CacheRequest) -> RecordLocation | None:
        if location := self.reader.find(request.name, request.parts):
            return location
        with self._lock:
            return self.recent.find(request.name, request.parts)

    def _make(self, request: CacheRequest, item: Item) -> RecordLocation:
        with self._making[hash(request.name) % LOCKS]:
            with self._lock:
                self.recent.refresh()
            if location := self._find(request):
                return location
            (made,) = self.job.make([self.job.load(item)])
            with self._lock:
                location = write_result(self.writer, request, made)
                self.recent.add_own(location)
            return location


def open_write_through(
    job: CacheJob[Item, Loaded],
    world: World,
    stop: Callable[[], None],
    writers: ExitStack,
    load_model: Callable[[], None],
) -> tuple[WriteThroughCache[Item, Loaded], dict[str, str]]:
    """Collective: open a cache that is written until `writers` is closed, and say which records cannot be
    made.

    The model is loaded before the engine is built, so that it is known at once if memory does not suffice;
    unless an earlier start has noted that all records are there.
    """
    listed, _, place, reader, broken = open_known(job, world, stop)
    if broken is None:
        load_model()
        # Only images can be broken. They are looked up only if the index says that some are.
        broken = look_up(reader, listed.requests())[1] if reader.index.reasons else {}
    world.store_barrier(f"{place}/read", stop)  # what is read at the start must be the same for all
    return WriteThroughCache(job, reader, writers.enter_context(open_writer(job, world.rank))), broken


CacheMode = Literal["precomputed", "write-through", "uncached"]
"""Records are made before training, or at their first use and stored, or at each use."""


def cache_mode(disable: bool, ondemand: bool) -> CacheMode:
    """Mode of a cache, by its settings `..._cache_disable` and `..._cache_ondemand`."""
    return "uncached" if disable else "write-through" if ondemand else "precomputed"


class RecordSource(Generic[Item, Loaded]):
    """Records of a job's items; a write-through cache is written until `writers` closes."""

    def __init__(
        self, job: CacheJob[Item, Loaded], mode: CacheMode, encoder: Encoder[Any], world: World, writers: ExitStack
    ) -> None:
        self.job, self.mode, self.encoder, self.world, self.writers = job, mode, encoder, world, writers
        self.reader: ShardReader | None = None
        self.write_through: WriteThroughCache[Item, Loaded] | None = None
        self._last = threading.local()

    def fill(self, report: Report, stop: Callable[[], None]) -> dict[str, str]:
        """Collective: make what is missing, unless that is done while training.

        Return the names of items whose files are known to be impossible to decode, with the reason.
        """
        broken: dict[str, str] = {}
        if self.mode == "uncached":
            self.encoder.load_early()
        elif self.mode == "write-through":
            self.write_through, broken = open_write_through(
                self.job, self.world, stop, self.writers, self.encoder.load_early
            )
        else:
            self.reader, broken = fill_cache(self.job, self.world, report, stop)
        return broken

    def record(self, item: Item) -> dict[str, Tensor]:
        """Tensors of an item, without a batch axis; missing ones are made in this thread.

        Raises DataError where its file turns out to be damaged.
        """
        made = self._made(item)
        if isinstance(made, str):
            # Not left out now: with another image in its place, batches would depend on that moment.
            hint = "run the same command again: it is left out then"
            if self.mode == "uncached":
                hint = "leave out vae_cache_disable and text_cache_disable: it is then left out before training"
            raise DataError(f"{self.job.request(item).name} cannot be decoded: {made}", f"remove it, or {hint}")
        return dict(made)

    def _made(self, item: Item) -> Made:
        if self.write_through is not None:
            return self.write_through.read(item)
        if self.reader is not None:
            request = self.job.request(item)
            location = self.reader.find(request.name, request.parts)
            assert location is not None, f"{request.name} is not in {self.job.folder} after filling it"
            return self.reader.read(location)
        # A sample's latents and its first frame are asked for one after the other.
        if getattr(self._last, "item", None) is not item:
            (self._last.made,), self._last.item = self.job.make([self.job.load(item)]), item
        return self._last.made
