"""A cache that is filled while training: a record is made when it is first needed, stored, and read from then on.

Each is made by itself, as in `on_demand`, so it is that of a cache filled with a batch size of 1.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic

from simpletuner.caches.fill.fill import look_up, open_on_all_ranks
from simpletuner.caches.fill.jobs import CacheJob, CacheRequest, Item, Loaded, Made
from simpletuner.caches.fill.tail import RecentRecords
from simpletuner.caches.fill.workers import open_writer, write_result
from simpletuner.caches.store.completion_note import read_note
from simpletuner.caches.store.keys import short_hash
from simpletuner.caches.store.records import RecordLocation
from simpletuner.caches.store.shards import ShardReader, ShardWriter

if TYPE_CHECKING:
    from simpletuner.parallel.world import World

# Threads that need the same record wait for one of them to make it; others rarely do.
LOCKS = 64


class GrowingCache(Generic[Item, Loaded]):
    """Read the records of a job's items, from any thread; `writer` stores those that were missing."""

    def __init__(self, job: CacheJob[Item, Loaded], reader: ShardReader, writer: ShardWriter) -> None:
        self.job, self.reader, self.writer = job, reader, writer
        self.recent = RecentRecords(job.folder, reader.index)
        self._lock = threading.Lock()
        self._making = [threading.Lock() for _ in range(LOCKS)]

    def read(self, item: Item) -> Made:
        """Return an item's tensors, or why they cannot be made. Raises EnvironmentNotReady when the disk is full."""
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


def open_growing(
    job: CacheJob[Item, Loaded],
    world: World,
    stop: Callable[[], None],
    writers: ExitStack,
    load_model: Callable[[], None],
) -> tuple[GrowingCache[Item, Loaded], dict[str, str]]:
    """Collective: open a cache that is written until `writers` is closed, and say which records cannot be made.

    The model is loaded before the engine is built, so that it is known at once if memory does not suffice; unless all
    records are known to be there, which a start that filled the cache has noted.
    """
    place = short_hash([job.folder, job.title, job.digest])
    reader = open_on_all_ranks(job, f"{place}/open", world, stop)
    broken = json.loads(world.from_first(f"{place}/known", lambda: json.dumps(read_note(reader, job.digest)), stop))
    if broken is None:
        load_model()
        # Only images can be broken. All are looked up only where some are known to be, which the index says at once.
        broken = look_up(reader, job.requests())[1] if reader.index.reasons else {}
    world.store_barrier(f"{place}/read", stop)  # what is read at the start must be the same for all
    return GrowingCache(job, reader, writers.enter_context(open_writer(job, world.rank))), broken
