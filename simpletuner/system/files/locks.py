"""File locks: on the cache folders in use, on a run's output folder, and on files that several processes update.

All are flock(2) locks. The kernel releases them when their process ends, however it ends, so no stale lock is left
behind. Holders of an exclusive lock may delete the lock file: a lock counts only while its path still leads to the
inode that was locked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.cache_files import IN_USE
from simpletuner.system.files.promises import NO_LOCKS

WAIT_SECONDS = 30
"""Longest wait for a lock that is only held while something is cleared or written."""

POLL_SECONDS = 0.02

CANNOT_LOCK = (errno.EACCES, errno.EPERM, errno.EROFS, *NO_LOCKS)
"""A read-only folder, or a file system without locks."""

RUN_LOCK = ".lock"
"""The lock file of a run's output folder; its content names the host and pid of the run."""

HANDOVER_SECONDS = 30
"""Longest wait for a run whose launcher has died: its ranks save their last step and exit."""
HANDOVER_POLL_SECONDS = 0.2
CLOCKS_SECONDS = 60
"""By which the clock of a file server may be behind this machine's."""


def lock_file(path: Path, exclusive: bool, create: bool = True, needed: bool = True) -> int:
    """Lock a file without waiting; return its descriptor, which the caller closes to release the lock.

    Unless the lock is `needed`, it is the descriptor of a file that is not locked where its file system has no locks.
    Raises BlockingIOError when another process holds it, FileNotFoundError when it does not exist, OSError when it
    cannot be locked.
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
    """Return whether any process holds a lock on a file; None where that cannot be determined.

    `exclusively`: whether one holds an exclusive lock; several may ask that at once and do not see each other.
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


@contextmanager
def shared_lock(folders: Iterable[Path]) -> Iterator[None]:
    """Lock cache folders for reading and writing by runs, so that `cache clear` leaves them alone.

    Missing folders are created. A read-only folder, or one on a file system without locks, is used unlocked. Raises
    EnvironmentNotReady when a folder cannot be created.
    """
    with ExitStack() as stack:
        for folder in sorted(set(folders)):
            descriptor = lock_shared(folder)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
        yield


def lock_shared(folder: Path) -> int | None:
    """Lock one cache folder, shared; return the descriptor, or None where it cannot be locked."""

    def attempt() -> int:
        folder.mkdir(parents=True, exist_ok=True)  # in every attempt: `cache clear` may just have removed it
        return lock_file(folder / IN_USE, exclusive=False)

    try:
        return retry_until_unlocked(attempt, f"{folder} is being cleared", WAIT_SECONDS)
    except OSError as error:
        if folder.is_dir() and error.errno in CANNOT_LOCK:
            return None
        hint = "make room or set cache_dir_vae and cache_dir_text elsewhere, then run the same command: it continues"
        raise EnvironmentNotReady(f"cannot write to the cache {folder}: {error.strerror}", hint) from None


def retry_until_unlocked(attempt: Callable[[], int], why: str, timeout_seconds: float) -> int:
    """Retry while another process holds the lock. Raises EnvironmentNotReady, beginning with `why`, at the timeout."""
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


@contextmanager
def lock_output_dir(
    output: Path, check: Callable[[], None] = lambda: None, say: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Lock a run's output folder until the run ends; `check` may raise to stop waiting.

    Raises EnvironmentNotReady when another run holds it: at once if that run's launcher is alive on this machine,
    otherwise after HANDOVER_SECONDS. Where the file system has no locks, a run of another machine is not found.
    """
    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output / RUN_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        wait_for_run_lock(descriptor, output, check, say)
        with suppress(OSError):  # on a full disk the holder's name is lost, the lock is not
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{socket.gethostname()} {launcher_pid()}\n".encode(), 0)
        yield
    finally:
        with suppress(OSError):  # the user has removed it
            if is_new and [*output.iterdir()] == [output / RUN_LOCK]:  # refused before anything was written
                (output / RUN_LOCK).unlink()
                output.rmdir()
        os.close(descriptor)


def wait_for_run_lock(descriptor: int, output: Path, check: Callable[[], None], say: Callable[[str], None]) -> None:
    end, reported, has_locks = time.monotonic() + HANDOVER_SECONDS, False, True
    while True:
        try:
            return flock_without_waiting(descriptor)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            has_locks = False
        check()
        holder = os.pread(descriptor, 200, 0).decode(errors="replace")
        if not has_locks and not (is_running_here(holder) and has_written(holder, descriptor)):
            return None
        if is_running_here(holder) or time.monotonic() > end:
            raise EnvironmentNotReady(
                f"another run is using {output}{describe_holder(holder)}",
                "wait for it, or give this one another --output_dir",
            )
        if not reported:
            say(f"waiting up to {HANDOVER_SECONDS} s for an earlier run to release {output}")
            reported = True
        time.sleep(HANDOVER_POLL_SECONDS)


def has_written(holder: str, descriptor: int) -> bool:
    """Return whether the process of a lock file can have written it: its pid may be another one's by now, or ours."""
    import psutil  # 10 ms, which commands that lock nothing do without

    pid = int(holder.split()[-1])
    try:
        began = psutil.Process(pid).create_time()
    except psutil.Error:
        return False
    return pid != launcher_pid() and began < os.fstat(descriptor).st_mtime + CLOCKS_SECONDS


def launcher_pid() -> int:
    """Return the pid that identifies the run: the parent of a rank, otherwise this process."""
    return os.getppid() if "RANK" in os.environ else os.getpid()


def is_running_here(holder: str) -> bool:
    """Return whether the process named in a lock file (`host pid`) runs on this machine."""
    host, _, pid = holder.strip().rpartition(" ")
    if host != socket.gethostname() or not pid.isdigit() or int(pid) <= 1:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def describe_holder(holder: str) -> str:
    """Return ` (pid 12 on host)` for the content of a lock file; empty if it does not name a process."""
    host, _, pid = holder.strip().rpartition(" ")
    return f" (pid {pid} on {host})" if host.isprintable() and host and pid.isdigit() else ""
