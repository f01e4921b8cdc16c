"""Remove the cached records that settings do not use: whole shards, and rewritten ones that hold both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simpletuner.caches.store.records import ALIGNMENT_BYTES, RecordLocation, record_keys
from simpletuner.caches.store.shard_index import MergedIndex, list_sources, open_index, read_index
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.cache_files import COMPLETE, IN_USE, MERGED_INDEX, bytes_of, files_of, index_of
from simpletuner.system.files.lease import nothing
from simpletuner.system.files.regular_files import open_regular
from simpletuner.tools.cache.clearing import lock_exclusively, removal_errors, remove_shards
from simpletuner.tools.cache.contents import CacheItem

if TYPE_CHECKING:
    from simpletuner.caches.workers import CacheRequest
    from simpletuner.settings import Loaded

# In the name of shards that hold what was kept of others.
REWRITING_RANK = 998

Needed = Mapping[Path, Iterable["CacheRequest"]]
"""Records that a run needs, by the resolved folder that caches them."""


@dataclass(frozen=True)
class UnusedRecords:
    """Unused parts of one cache: files without a used record, and `mixed` shards, which are rewritten.

    `used` says which rows of the index are used.
    """

    item: CacheItem
    index: MergedIndex
    used: NDArray[np.bool_]
    files: list[Path] = field(default_factory=list)
    mixed: list[Path] = field(default_factory=list)
    bytes: int = 0

    @property
    def records(self) -> int:
        return int((~self.used).sum())

    def as_json(self) -> dict[str, object]:
        return self.item.as_json() | {"unused_entries": self.records, "unused_bytes": self.bytes}


def needed_by(loaded: Loaded) -> Needed:
    """Records that a run with these settings reads. Raises the run's errors about data and base model."""
    from simpletuner.caches.sources import open_sources
    from simpletuner.data.config.places import default_folder
    from simpletuner.data.scan.scan import copy_scans
    from simpletuner.models.opening.loading import load_family
    from simpletuner.parallel.mesh import Mesh
    from simpletuner.parallel.world import joined_world
    from simpletuner.preparation.class_images import with_file_versions
    from simpletuner.preparation.prepare import fit_to_model, plan_data, texts_of
    from simpletuner.report import Report
    from simpletuner.session import Session
    from simpletuner.system.processes.signals import StopRequest

    with joined_world({}, use_cpu=True) as world, TemporaryDirectory() as folder:
        session = Session(loaded, Mesh(world), Report(quiet=True), StopRequest())
        scans = copy_scans(default_folder(session.settings, "scan"), Path(folder))
        plan = with_file_versions(plan_data(session, scans))
        family = load_family(session.settings, world, session.stop.check)
        plan, sampled = fit_to_model(session, plan, family)  # on which the keys of records depend
        prompts = texts_of(sampled, family)
        sources = open_sources(session.settings, plan.samples, plan.texts, prompts, family, world, ExitStack())
    needed: dict[Path, Iterable[CacheRequest]] = {}
    for cache in sources.caches:
        folder = cache.job.folder.resolve()
        needed[folder] = chain(needed.get(folder, ()), cache.job.requests())
    return needed


def find_unused(item: CacheItem, needed: Needed) -> UnusedRecords:
    index = open_index(item.path)
    rows = index.find(record_keys((each.name, each.parts) for each in needed.get(item.path.resolve(), ())))
    used = np.zeros(len(index.rows), bool)
    used[rows[rows >= 0]] = True
    shards, lengths = index.rows["shard"][used], index.rows["length"][used].astype(np.int64)
    kept_bytes = np.bincount(shards, -(-lengths // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, len(index.sources))
    kept = {item.path / index.sources[number][0] for number in np.unique(shards).tolist()}
    # Beyond its used records a shard holds others, retracted ones, or what a killed writer left.
    spare = {
        item.path / source[0]: source[3] - int(size)
        for source, size in zip(index.sources, kept_bytes, strict=True)
        if item.path / source[0] in kept and source[3] > size
    }
    names = {path.name for shard in kept for path in (shard, index_of(shard))} | {MERGED_INDEX, COMPLETE}
    files = [path for path in files_of(item.path)[0] if path.name not in names and path.stem != IN_USE]
    return UnusedRecords(item, index, used, files, list(spare), sum(map(bytes_of, files)) + sum(spare.values()))


def remove_unused(found: Sequence[UnusedRecords], say: Callable[[str], None] = nothing) -> int:
    """Remove what was found, and return how many bytes that freed.

    Raises EnvironmentNotReady, before removing anything, if a run uses one or has done so since.
    """
    with ExitStack() as stack, removal_errors():
        for each in found:
            # All locks before the first removal: either nothing is in use, or nothing is removed.
            lock_exclusively(each.item, stack, say)
            if list_sources(each.item.path) != list(each.index.sources):
                raise EnvironmentNotReady(
                    f"{each.item.path} has changed, so nothing is removed", "run this command again"
                )
        return sum(map(remove_from, found))


def remove_from(unused: UnusedRecords) -> int:
    folder = unused.item.path
    if not unused.used.any():
        return remove_shards(unused.item)
    before = sum(map(bytes_of, files_of(folder)[0]))
    for shard in unused.mixed:
        rewrite(shard, unused)
    for path in unused.files:  # last: among them are shards that retract records of those rewritten
        path.unlink(missing_ok=True)
    open_index(folder)
    return before - sum(map(bytes_of, files_of(folder)[0]))


def rewrite(shard: Path, unused: UnusedRecords) -> None:
    """Replace a shard by one with its used records. Killed at any moment, at worst it leaves both."""
    from simpletuner.caches.store.shards import ShardWriter

    with ShardWriter(shard.parent, REWRITING_RANK) as writer, open_regular(shard) as file:
        for place in (entry.location for entry in read_index(index_of(shard)) if not entry.retracts):
            file.seek(place.offset)
            record = file.read(place.length)
            # A damaged record is made again by the next run.
            if is_used(place, unused) and place.checksum in ("", place.checksum_with(record)):
                writer.copy(place, record)
    # After the new shard is closed: a kill leaves the record twice, never not at all.
    shard.unlink()
    index_of(shard).unlink(missing_ok=True)


def is_used(place: RecordLocation, unused: UnusedRecords) -> bool:
    row = int(unused.index.find(record_keys([(place.name, place.parts)]))[0])
    if row < 0 or not unused.used[row]:
        return False
    # Of two records with one key only the last one is found by readers, so the other one is unused.
    found = unused.index.location(place.shard.parent, row, place.name, place.parts)
    return (found.shard, found.offset) == (place.shard, place.offset)
