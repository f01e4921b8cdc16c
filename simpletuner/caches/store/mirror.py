"""A cache in a bucket: its local folder has all indexes, and of the shards what was read or written lately.

A full shard is uploaded, then its index, so an index never names bytes missing in the bucket. A shard without
a read record is a sparse file of the same size here; a record with a wrong checksum is fetched into it. So
all else works with the folder as with any other cache. Shards have random numbers: runs that share a bucket
never write the same object.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO

from simpletuner.caches.store.records import RecordLocation
from simpletuner.caches.store.shard_index import read_index
from simpletuner.caches.store.shards import ShardWriter, read_from_file
from simpletuner.data.storage.storage import MAX_BYTES
from simpletuner.system.files.atomic import create_new, unfinished_path, write_file
from simpletuner.system.files.cache_files import INDEX_SUFFIX, OURS, SHARD_SUFFIX, disk_bytes, index_of
from simpletuner.system.files.late_files import size_of
from simpletuner.system.files.locks import is_locked
from simpletuner.system.files.mounts import rename_over

if TYPE_CHECKING:
    from simpletuner.data.storage.object_storage import ObjectStorage

# A killed run re-uploads at most one of these per rank; a first start elsewhere requests each once.
SHARD_BYTES = 128 << 20
# Of shards, at random: two of a million are equal with odds of 5e-4.
NUMBERS = 10**15
# Shards of a rank that are uploaded at once, each in parts, while the next one is written.
UPLOADS = 2


@dataclass(eq=False)
class Mirror:
    """The local copy of a cache in a bucket. `stored` are the shards that are known to be in the bucket."""

    folder: Path
    storage: ObjectStorage
    limit_bytes: int
    stored: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _whole_shards: threading.Lock = field(default_factory=threading.Lock)
    """Held while a store that answers no ranges sends a whole shard."""
    _new_bytes: int = 0

    def synchronize(self, stop: Callable[[], None], written: Mapping[str, int] = MappingProxyType({})) -> None:
        """Fetch the indexes that are in the bucket alone, and upload the shards that an interrupted run has
        left here.

        `written` are files, with sizes, of all ranks; a network file system may not list them yet. For one
        rank, while no other one writes. Ends the run if the store does not answer.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        away = {name: size for name, size in self.storage.sizes().items() if OURS.fullmatch(name)}
        kept = (path for path in self.folder.iterdir() if path.name.endswith((SHARD_SUFFIX, INDEX_SUFFIX)))
        here = {path.name: size_of(path) for path in kept if OURS.fullmatch(path.name)}  # another run may remove them
        here |= written
        shards = {name for name in away if name.endswith(SHARD_SUFFIX) and index_name(name) in away}
        with ThreadPoolExecutor(self.storage.concurrent_reads, thread_name_prefix="fetch") as pool:
            run_all(pool, self._fetch_index, (n for n in shards if is_behind(n, here, away)), away, stop)
            # A run that was killed leaves shards that were not uploaded yet.
            left = {name for name in here if name.endswith(SHARD_SUFFIX) and index_name(name) in here}
            run_all(pool, self._restore, (n for n in left if n not in shards or is_behind(n, away, here)), away, stop)

    def record(self, location: RecordLocation) -> memoryview:
        """Record from the local copy, else from the bucket. Raises ValueError where it is damaged there."""
        # A hole reads as zeros with another checksum than the record's, so no list of fetched ones is kept.
        here = read_from_file(location)
        if location.checksum_with(here) == location.checksum:
            return here
        if not self.storage.ranges.are_missing:
            return self._fetch(location)
        with self._whole_shards:
            here = read_from_file(location)  # which another thread may have fetched with its shard
            return here if location.checksum_with(here) == location.checksum else self._fetch(location)

    def _fetch(self, location: RecordLocation) -> memoryview:
        """Record from the bucket, and keep it; all of its shard where the store gives no parts of objects."""
        shard, kept = location.shard, list[bytes]()
        try:
            content = self.storage.read_range(shard.name, location.offset, location.length, kept.append)
        except FileNotFoundError:
            raise ValueError(f"{self.storage.describe(shard.name)} does not exist any more") from None
        if location.checksum_with(content) != location.checksum:
            raise ValueError(f"its checksum does not match in {self.storage.describe(shard.name)} either")
        new, place = (kept[0], 0) if kept else (content, location.offset)
        # If the disk is full, or another rank replaces the shard, the record is fetched again on use.
        with contextlib.suppress(OSError), open_own(shard, os.O_WRONLY) as file:
            os.pwrite(file.fileno(), new, place)
        self._count(len(new))
        return content

    @contextmanager
    def writer(self, rank: int, compress: bool) -> Iterator[ShardWriter]:
        """Open a writer whose shards are uploaded in the background; at the end, wait for them.

        Where the run ends with an error, what was not uploaded is left for the next start.
        """
        pool, uploads = ThreadPoolExecutor(UPLOADS, thread_name_prefix="upload"), list[Future[None]]()

        def upload(shard: Path) -> None:
            for each in [each for each in uploads if each.done()]:
                each.result()
            uploads.append(pool.submit(self._upload, shard))

        try:
            with ShardWriter(self.folder, rank, compress, self.random_number(), SHARD_BYTES, upload) as writer:
                yield writer
            for each in uploads:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)

    @staticmethod
    def random_number() -> int:
        """Return the number of a shard that no other writer has."""
        return secrets.randbelow(NUMBERS)

    def _fetch_index(self, shard: str, away: dict[str, int]) -> None:
        make_sparse(self.folder / shard, away[shard])
        index = index_name(shard)
        write_file(self.folder / index, self.storage.read(index, MAX_BYTES))

    def _restore(self, name: str, away: dict[str, int]) -> None:
        """Upload a shard missing in the bucket; if records are missing here, remove it to remake them."""
        shard = self.folder / name
        if is_locked(shard):  # another run writes it, and uploads it then
            return
        places = [entry.location for entry in read_index(index_of(shard))]
        if places and all(place.checksum_with(read_from_file(place)) == place.checksum for place in places):
            self._upload(shard)
        else:
            index_of(shard).unlink(missing_ok=True)  # another run may have done so
            shard.unlink(missing_ok=True)

    def _upload(self, shard: Path) -> None:
        # In this order: an index never names bytes that are not in the bucket.
        for path in (shard, index_of(shard)):
            self.storage.upload(path.name, path)
        self.stored.add(shard.name)
        self._count(shard.stat().st_size)

    def _count(self, new_bytes: int) -> None:
        """Make room in the local copy from time to time."""
        with self._lock:
            self._new_bytes += new_bytes
            if self._new_bytes < min(self.limit_bytes // 32, 2 * SHARD_BYTES):
                return
            self._new_bytes = 0
            self._make_room()

    def _make_room(self) -> None:
        """Empty the shards that were not written to for longest until the local copy is within its limit."""
        with os.scandir(self.folder) as entries:
            found = [(entry.stat(), entry.name) for entry in entries if entry.name.endswith(SHARD_SUFFIX)]
        used = sum(disk_bytes(state) for state, _ in found)
        for state, name in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if used <= self.limit_bytes:
                return
            if name in self.stored and disk_bytes(state):
                replace_by_sparse(self.folder / name, state.st_size)
                used -= disk_bytes(state)


def index_name(shard: str) -> str:
    return index_of(Path(shard)).name


def is_behind(shard: str, one: dict[str, int], other: dict[str, int]) -> bool:
    # Shard files only grow.
    return any(one.get(name, -1) < other[name] for name in (shard, index_name(shard)))


def make_sparse(path: Path, size: int) -> None:
    # A hole reads as zeros and takes no space; a link is not followed.
    with open_own(path, os.O_WRONLY | os.O_CREAT) as file:
        if os.fstat(file.fileno()).st_size < size:
            file.truncate(size)


def open_own(path: Path, flags: int) -> BinaryIO:
    return os.fdopen(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "wb", buffering=0)


def replace_by_sparse(path: Path, size: int) -> None:
    """Empty a shard. It becomes another file, so a rank that reads it now has it until it is closed."""
    hidden = unfinished_path(path)
    with contextlib.suppress(FileNotFoundError, FileExistsError):  # another rank did the same
        with create_new(hidden) as file:
            file.truncate(size)
        rename_over(hidden, path)


def run_all(
    pool: ThreadPoolExecutor,
    work: Callable[[str, dict[str, int]], None],
    names: Iterable[str],
    away: dict[str, int],
    stop: Callable[[], None],
) -> None:
    """Do some work for each shard in parallel; `stop` raises when the run is to end."""
    waiting = [pool.submit(work, name, away) for name in sorted(names)]
    try:
        for each in waiting:
            stop()
            each.result()
    finally:
        for each in waiting:
            each.cancel()
