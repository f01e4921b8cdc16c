"""File locks: of leases (lease.py), and on files that several processes of a machine update.

All are flock(2) locks. The kernel releases them when their process ends, however it ends, so no stale lock is
left behind. Holders of an exclusive lock may delete the lock file: a lock counts only while its path still
leads to the inode that was locked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.mounts import NO_LOCKS

# Longest wait for a lock that is only held while something is cleared or written.
WAIT_SECONDS = 30

POLL_SECONDS = 0.02

CANNOT_LOCK = (errno.EACCES, errno.EPERM, errno.EROFS, *NO_LOCKS)
"""A read-only folder, or a file system without locks."""

# The lock file of a run's output folder; its content is the record of the run (lease_record.py).
RUN_LOCK = ".lock"


def lock_file(path: Path, exclusive: bool, create: bool = True, needed: bool = True) -> int:
    """Lock a file without waiting; return its descriptor, which the caller closes to release the lock.

    Unless the lock is `needed`, it is the descriptor of a file that is not locked where its file system has
    no locks. Raises BlockingIOError when another process holds it, FileNotFoundError when it does not exist,
    OSError when it cannot be locked.
    """
    while True:
        descriptor = open_lock_file(path, create)
        try:
            with suppress_no_locks() if not needed else nullcontext():
                flock_without_waiting(descriptor, exclusive)
            if is_same_inode(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its former holder deleted the file between our open and our flock


def open_lock_file(path: Path, create: bool) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    except OSError as error:
        if error.errno not in CANNOT_LOCK or not path.exists():
            raise
        return os.open(path, flags | os.O_RDONLY)  # flock does not need write permission, except on NFS


def flock_without_waiting(descriptor: int, exclusive: bool = True) -> None:
    """Lock an open file. Raises BlockingIOError when another process holds it."""
    fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)


@contextmanager
def suppress_no_locks() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def is_same_inode(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_locked(path: Path, exclusively: bool = False) -> bool | None:
    """True if any process holds a lock on a file; None if that cannot be determined.

    `exclusively`: whether one holds an exclusive lock; several may ask that at once and do not see each
    other.
    """
    try:
        os.close(lock_file(path, exclusive=not exclusively, create=False))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def retry_until_unlocked(attempt: Callable[[], int], why: str, timeout_seconds: float) -> int:
    """Retry while another process holds the lock. Raises EnvironmentNotReady (`why`) at the timeout."""
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            return attempt()
        except (BlockingIOError, FileNotFoundError):
            if time.monotonic() > end:
                raise EnvironmentNotReady(
                    f"{why}: waited {timeout_seconds:.0f} s", "run the same command again"
                ) from None
        time.sleep(POLL_SECONDS)


@contextmanager
def removed_lock(path: Path, wait: Callable[[], object]) -> Iterator[None]:
    """Hold a lock file, removed at the end; `wait`, which may raise, is called while another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            descriptor = lock_file(path, exclusive=True, needed=False)
            break
        except BlockingIOError:
            wait()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is free: its holder may remove it
        os.close(descriptor)


@contextmanager
def sole_writer(target: Path) -> Iterator[None]:
    """Keep other commands from writing this file or folder. Raises EnvironmentNotReady where one does."""

    def refuse() -> None:
        raise EnvironmentNotReady(f"another command is writing {target}", "wait for it, or name another --output")

    with removed_lock(target.with_name(f".{target.name}.lock"), refuse):
        yield


@contextmanager
def exclusive_lock(path: Path, timeout_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Lock a file exclusively, waiting for it if necessary. Raises EnvironmentNotReady at the timeout.

    Files are replaced at once, so that where there are no locks the last of two writers wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = retry_until_unlocked(
        lambda: lock_file(path, exclusive=True, needed=False), f"another process holds {path}", timeout_seconds
    )
    try:
        yield
    finally:
        os.close(descriptor)
