"""Atomic file and directory writes (write to a temporary name, fsync, rename), and the lock on a run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a run's own files are appended to: links are not followed, and a FIFO without a reader is refused."""


def unfinished(folder: Path) -> Path:
    """Return the hidden folder (or file) in which a folder (or file) is written before it is renamed."""
    return folder.with_name(f".{folder.name}.unfinished")


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; what was there before is removed only after the new one is in place."""
    old = folder.with_name(f".{folder.name}.old")
    remove(old)
    if os.path.lexists(folder):
        folder.rename(old)
    new.rename(folder)
    flush_to_disk(folder.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def restore_replaced(folder: Path) -> None:
    """Undo or finish what a killed `replace_folder` left: the older folder returns if the new one is not in place."""
    old = folder.with_name(f".{folder.name}.old")
    if old.is_dir() and not old.is_symlink() and not folder.exists():
        old.rename(folder)
    remove(old)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file anew, so that it is whole at any time; what its name leads to and its mode stay. Raises OSError."""
    if path.exists() and not path.is_file():  # a device or a pipe, which nothing can take the place of
        path.write_bytes(content)
        return
    path = path.resolve()
    new = unfinished(path)
    new.write_bytes(content)
    if path.exists():
        shutil.copymode(path, new)
    flush_to_disk(new)
    new.replace(path)
    flush_to_disk(path.parent)


def read_file(path: Path) -> bytes:
    """Return a file's content. Raises OSError, also for a FIFO or a device, which may never end.

    What a shell passes as /dev/fd/N (`--config=<(...)`) is read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO would wait for a writer
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not str(path).startswith(("/dev/", "/proc/")):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "is a directory" if code == errno.EISDIR else "not a regular file", str(path))
        os.set_blocking(descriptor, True)
        return file.read()


def write_json(path: Path, value: object) -> None:
    """Write JSON, atomically and durably."""
    write_file(path, (json.dumps(value, indent=2) + "\n").encode("utf-8"))


def write_file(path: Path, content: bytes) -> None:
    """Write one of a run's own files, atomically and durably. A link of that name is replaced, never followed."""
    hidden = unfinished(path)
    hidden.unlink(missing_ok=True)
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        hidden.replace(path)
    except OSError:
        hidden.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


HANDOVER_SECONDS = 30
"""How long to wait for a run whose launcher is gone: its ranks save their last step, and leave."""
POLL_SECONDS = 0.2


@contextmanager
def sole_user_of(
    output: Path, check: Callable[[], None] = lambda: None, say: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Hold a run's folder for as long as the run lives; `check` may raise to end the waiting.

    Raises EnvironmentFault when another run holds it: at once where its process runs on this machine, otherwise when
    it has not let go after a while.
    """
    output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        end, said = time.monotonic() + HANDOVER_SECONDS, False
        while not locked(descriptor):
            check()
            if is_run_of(holder := os.pread(descriptor, 200, 0).decode(errors="replace")) or time.monotonic() > end:
                raise EnvironmentNotReady(
                    f"another run is using {output}{holder_named(holder)}",
                    "wait for it, or give this one another --output_dir",
                )
            if not said:
                say(f"waiting up to {HANDOVER_SECONDS} s for an earlier run to let go of {output}")
                said = True
            time.sleep(POLL_SECONDS)
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{socket.gethostname()} {launcher_pid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def locked(descriptor: int) -> bool:
    """Return whether a file could be locked for this process alone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def launcher_pid() -> int:
    """Return the process by whose life a run is known to go on: the parent of a rank, otherwise this one."""
    return os.getppid() if "RANK" in os.environ else os.getpid()


def is_run_of(holder: str) -> bool:
    """Return whether the process that a lock names runs on this machine."""
    host, _, pid = holder.strip().rpartition(" ")
    if host != socket.gethostname() or not pid.isdigit() or int(pid) <= 1:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def holder_named(holder: str) -> str:
    """Return who holds a lock, as far as it says so."""
    host, _, pid = holder.strip().rpartition(" ")
    return f" (pid {pid} on {host})" if host.isprintable() and host and pid.isdigit() else ""
