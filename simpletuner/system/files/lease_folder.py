"""Leases of folders: of the output folder that one run writes, and of cache folders that several use."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.cache_files import IN_USE
from simpletuner.system.files.lease import Holding, Lease, Place, asked, nothing, watch_seconds
from simpletuner.system.files.lease_record import RECORD_BYTES, Record
from simpletuner.system.files.locks import (
    CANNOT_LOCK,
    RUN_LOCK,
    WAIT_SECONDS,
    is_locked,
    is_same_inode,
    lock_file,
    retry_until_unlocked,
)
from simpletuner.system.files.mounts import NO_LOCKS, FileSystem, file_system_at, sync
from simpletuner.system.files.regular_files import retry_while_replaced

FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_BYTES = 4096


class FolderPlace(Place):
    """The record of a folder is the content of its lock file, which is written over and never replaced."""

    def __init__(self, folder: Path, name: str = RUN_LOCK, system: FileSystem | None = None) -> None:
        """`system` is what is known of the file system, by default from the mounts of this machine."""
        self.folder, self.name, self.known_system = folder, name, system
        self.descriptor: int | None = None

    @property
    def system(self) -> FileSystem:
        self.known_system = self.known_system or file_system_at(self.folder)
        return self.known_system

    @property
    def holds_lock(self) -> bool:
        return self.descriptor is not None and is_same_inode(self.folder / self.name, self.descriptor)

    def describe(self) -> str:
        return str(self.folder)

    def read(self, name: str) -> bytes | None:
        return retry_while_replaced(path := self.folder / name, partial(read_own_file, path))

    def create(self, name: str, content: bytes) -> bool:
        try:
            self._write(name, content, os.O_EXCL)
        except FileExistsError:
            return False
        return True

    def write(self, name: str, content: bytes) -> None:
        self._write(name, content)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def lock(self, exclusive: bool) -> bool | None:
        if not self.system.creates_exclusively:
            return None  # s3fs and rclone mount do not read again what anybody here holds open
        try:
            self.descriptor = lock_file(self.folder / self.name, exclusive)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return None
        return False

    def unlock(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _write(self, name: str, content: bytes, flag: int = 0) -> None:
        # Opened for each record: what s3fs and rclone mount hold open is not there for others.
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.folder / name, flags | flag, 0o666)
        try:
            os.pwrite(descriptor, content, 0)
            if os.fstat(descriptor).st_size > RECORD_BYTES:  # of an earlier version
                os.ftruncate(descriptor, RECORD_BYTES)
            if not self.system.is_local:
                sync(descriptor)
        except OSError as error:
            if error.errno not in FULL or not self.system.is_local:
                raise  # on a full disk the holder's name is lost, the lock is not
        finally:
            os.close(descriptor)


def read_own_file(path: Path) -> bytes | None:
    """Beginning of a file; None for none, of a FIFO or the like no record. Links are not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):  # records are written over: a missing one is not replaced
        return None
    try:
        return os.read(descriptor, MAX_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b"?"
    finally:
        os.close(descriptor)


@contextmanager
def held_folder(
    folder: Path, lease: Lease, stop: Callable[[], None] = nothing, say: Callable[[str], None] = nothing
) -> Iterator[None]:
    """Hold a run's output folder until the run ends; `stop` may raise to end waiting for an earlier run.

    Raises LeaseLost when another run holds it: at once where that is known at once.
    """
    while True:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lease.acquire(FolderPlace(folder), stop, say)
            break
        except FileNotFoundError:
            if folder.exists():
                raise
        # Another start was refused just now, and has removed the folder that it had made.
    try:
        yield
    finally:
        with suppress(OSError):  # the user has removed it
            own = {RUN_LOCK, f"{RUN_LOCK}.{lease.record.token}"}
            if is_new and {each.name for each in folder.iterdir()} <= own:  # refused before anything was written
                for name in own:
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()
        lease.release()


def holder_of(path: Path) -> tuple[Record, Holding]:
    """Holder of a lock file's folder, as far as it can be determined without waiting."""
    record, holding = asked(FolderPlace(path.parent, path.name), is_locked(path, exclusively=True))
    return record or Record(), holding


class StandingRecords:
    """Records of holders that cannot be seen from here, and since when each stands still."""

    def __init__(self) -> None:
        self.seen: dict[Path, tuple[Record, float]] = {}

    def is_dead(self, path: Path, record: Record) -> bool:
        """True if a record has not changed for longer than its holder lives without renewing it."""
        before, since = self.seen.get(path, (None, 0.0))
        if before != record:
            since = time.monotonic()
            self.seen[path] = record, since
        limit = watch_seconds(record, FolderPlace(path.parent).system)
        return bool(record.id) and time.monotonic() - since > limit


@contextmanager
def shared_folders(
    folders: Iterable[Path], stop: Callable[[], None] = nothing, say: Callable[[str], None] = nothing
) -> Iterator[None]:
    """Use cache folders, which `cache clear` then leaves alone, on this rank.

    Missing folders are created. A read-only folder is used without saying so. Raises EnvironmentNotReady when
    a folder cannot be created, or is being cleared; `stop` may raise to end waiting for that.
    """
    with ExitStack() as stack:
        for folder in sorted(set(folders)):
            place, lease = FolderPlace(folder, IN_USE), Lease()
            stack.callback(place.unlock)
            if lock_shared(place):
                stack.callback(lease.release)
                if not place.system.shows_locks and os.environ.get("RANK", "0") == "0":
                    with suppress(OSError):  # a file of another user
                        lease.share(place, stop, say)
        yield


def lock_shared(place: FolderPlace) -> bool:
    """Lock a cache folder, shared; return False for one that can only be read."""

    def attempt() -> int:
        place.folder.mkdir(parents=True, exist_ok=True)  # each time: `cache clear` may have removed it
        if place.lock(exclusive=False):
            raise BlockingIOError
        return 0

    try:
        retry_until_unlocked(attempt, f"{place.folder} is being cleared", WAIT_SECONDS)
    except OSError as error:
        if place.folder.is_dir() and error.errno in CANNOT_LOCK:
            return False
        hint = "make room or set cache_dir_vae and cache_dir_text elsewhere, then run the same command: it continues"
        raise EnvironmentNotReady(f"cannot write to the cache {place.folder}: {error.strerror}", hint) from None
    return True


def is_used(folder: Path) -> bool | None:
    """True if a run uses a cache folder; None if only watching it for a while can tell."""
    path = folder / IN_USE
    found = is_locked(path)
    place = FolderPlace(folder, IN_USE)
    if found or place.system.shows_locks:
        return found
    return {Holding.HELD: True, Holding.FREE: False, Holding.UNSURE: None}[asked(place, found)[1]]
