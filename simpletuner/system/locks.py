"""Hold what is in use: locks of the kernel (flock), which end with the process that took them, however it ends.

Runs share a cache folder; who clears it must be alone. A lock file may be deleted by whoever holds it alone: a lock
counts only while the file that was locked is still the one that the name leads to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.cache_files import IN_USE

PATIENCE_SECONDS = 30
"""How long to wait for a lock that is held only while something is cleared or written."""

POLL_SECONDS = 0.02

CANNOT_LOCK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""A folder that may only be read, or a file system without locks."""


def locked(path: Path, exclusive: bool, create: bool = True) -> int:
    """Lock a file without waiting; return its descriptor, which is to be closed.

    Raises BlockingIOError when others hold it, FileNotFoundError when it is not there, OSError when it cannot be.
    """
    while True:
        descriptor = opened(path, create)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if is_same_inode(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def opened(path: Path, create: bool) -> int:
    """Return a descriptor of a lock file; a file that may only be read can be locked, too."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    except OSError as error:
        if error.errno not in CANNOT_LOCK or not path.exists():
            raise
        return os.open(path, flags | os.O_RDONLY)


def is_same_inode(path: Path, descriptor: int) -> bool:
    """Return whether a name still leads to an open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool | None:
    """Return whether any process holds a lock file; None where that cannot be told."""
    try:
        os.close(locked(path, exclusive=True, create=False))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


@contextmanager
def shared_lock(folders: Iterable[Path]) -> Iterator[None]:
    """Hold cache folders, together with other runs, so that nobody clears them; they are made if need be.

    A folder that can only be read, or whose file system has no locks, is used without a hold. Raises EnvironmentFault
    when a folder cannot be made.
    """
    with ExitStack() as stack:
        for folder in sorted(set(folders)):
            descriptor = shared(folder)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
        yield


def shared(folder: Path) -> int | None:
    """Return the descriptor of a shared hold, or None where there can be none."""

    def attempt() -> int:
        """Make the folder again, too: clearing may have removed it just now."""
        folder.mkdir(parents=True, exist_ok=True)
        return locked(folder / IN_USE, exclusive=False)

    try:
        return retry_until_unlocked(attempt, f"{folder} is being cleared", PATIENCE_SECONDS)
    except OSError as error:
        if folder.is_dir() and error.errno in CANNOT_LOCK:
            return None
        hint = "make room or set cache_dir_vae and cache_dir_text elsewhere, then run the same command: it continues"
        raise EnvironmentNotReady(f"cannot write to the cache {folder}: {error.strerror}", hint) from None


@contextmanager
def exclusive_lock(path: Path, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold a lock file alone, and wait for it if need be. Raises EnvironmentFault when that takes too long."""

    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=patience_seconds)
    try:
        lock.acquire(poll_interval=POLL_SECONDS)
    except Timeout:
        raise EnvironmentNotReady(
            f"another process holds {path}: waited {patience_seconds:.0f} s", "run the same command again"
        ) from None
    try:
        yield
    finally:
        lock.release()


def retry_until_unlocked(attempt: Callable[[], int], why: str, patience_seconds: float) -> int:
    """Try until nobody else holds the lock. Raises EnvironmentFault that says why it took too long."""
    end = time.monotonic() + patience_seconds
    while True:
        try:
            return attempt()
        except (BlockingIOError, FileNotFoundError):
            if time.monotonic() > end:
                raise EnvironmentNotReady(
                    f"{why}: waited {patience_seconds:.0f} s", "run the same command again"
                ) from None
        time.sleep(POLL_SECONDS)
