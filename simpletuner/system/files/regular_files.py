"""Opening regular files and nothing else; files of state that cannot be read are moved aside and named.

Opening a FIFO blocks until there is a writer, reading a device may never end, and a sparse file of a few
bytes may claim a terabyte. Any name in a folder may be one of these, so files are opened here.
`RangeReader` serves ranges of an object in a bucket, or parts of another file.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from simpletuner.system.files.paths import descriptor_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


# The largest file read whole if the caller names no other limit; state.json of 12B weights takes 2 MiB.
MAX_BYTES = 256 << 20

# Seconds of retries for a file that is just being replaced: GlusterFS answers ESTALE for up to 1 s.
REPLACED_SECONDS = 2.0
RETRY_SECONDS = 0.001
# Attempts after which a file that stat(2) does not find, either, is missing.
MISSES = 5

T = TypeVar("T")


def open_regular(path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading; links are followed.

    Raises OSError also for a folder, a FIFO, a socket, a device, and a file above `max_bytes`.
    """
    file = retry_while_replaced(path, lambda: open_any(path))
    try:
        refuse_other(file, path, max_bytes)
    except OSError:
        file.close()
        raise
    return file


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Raise OSError as `open_regular` does, for a file that a library opens by its name."""
    open_regular(path, max_bytes).close()


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a file's content, or what a pipe at /dev/stdin or /dev/fd/N holds (`--config=<(...)`).

    Raises OSError as `open_regular` does, also for a pipe that gives more than `max_bytes`.
    """
    return retry_while_replaced(path, lambda: read_whole(path, max_bytes))


def read_whole(path: Path, max_bytes: int) -> bytes:
    with open_any(path) as file:
        status = os.fstat(file.fileno())
        pipe = descriptor_of(path) if stat.S_ISFIFO(status.st_mode) else None
        if pipe is None and str(path) != os.devnull:
            refuse_other(file, path, max_bytes)
        content = file.read((status.st_size or max_bytes) + 1)  # pipes and /proc's files claim to be empty
    if len(content) > max_bytes:
        raise too_large(path, max_bytes)
    if pipe is not None:
        replace_pipe(pipe, content)
    return content


def read_end(path: Path, size: int) -> bytes:
    """Last `size` bytes of a file; none where it is missing. Raises OSError as `open_regular` does."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return b""
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size)


def replace_pipe(descriptor: int, content: bytes) -> None:
    # A pipe can be read only once, and ranks must read it, too.
    from tempfile import TemporaryFile  # 2 ms of each command

    with TemporaryFile() as file:
        file.write(content)
        file.flush()
        os.dup2(file.fileno(), descriptor)


def open_any(path: Path) -> BufferedReader:
    """Open whatever has this name, without waiting for a FIFO's writer. Raises OSError."""
    try:
        file = open(path, "rb", opener=open_at_once)
    except IsADirectoryError as error:
        raise IsADirectoryError(error.errno, "is a directory", str(path)) from None
    except OSError as error:
        if error.errno != errno.ENXIO:  # of a socket, or of a device that is not there
            raise
        raise not_regular(path) from None
    os.set_blocking(file.fileno(), True)
    return file


def retry_while_replaced(path: Path, action: Callable[[], T]) -> T:
    """Open or read a file, and try again for a while where it is just being replaced by a rename. Raises
    OSError.

    On FUSE the node that open(2) or stat(2) was sent for may be gone by then: of 7,020 reads on bindfs 60
    found no file (https://github.com/libfuse/libfuse/issues/637). ESTALE is what GlusterFS and NFS answer for
    a file that another client has replaced.
    """
    end, missing = time.monotonic() + REPLACED_SECONDS, 0
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > end:
                raise
            if error.errno == errno.ENOENT and not os.path.exists(path):  # noqa: PTH110 - Path.exists raises ESTALE
                missing += 1
                if missing == MISSES or has_own_device(path.parent):
                    raise
        time.sleep(RETRY_SECONDS)


def has_own_device(folder: Path) -> bool:
    """True if a folder is missing, or on a local disk, which replaces at once; FUSE and NFS have major 0."""
    try:
        return os.major(folder.stat().st_dev) > 0
    except OSError:
        return True


def open_at_once(path: str, flags: int) -> int:
    # O_NOCTTY: a terminal does not become the one of this process by being opened.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def refuse_other(file: BinaryIO, path: Path, max_bytes: int | None) -> None:
    """Raise OSError for what is not a regular file, or is larger than `max_bytes`."""
    status = os.fstat(file.fileno())  # of the open file: the path may be replaced meanwhile
    if not stat.S_ISREG(status.st_mode):
        raise not_regular(path)
    if max_bytes is not None and status.st_size > max_bytes:
        raise too_large(path, max_bytes)


def not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))


def too_large(path: Path, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", str(path))


WHOLE_BYTES = 1 << 30


class RangeReader(io.RawIOBase):
    """Read by ranges: `fetch(start, length)` returns bytes, and the size of the whole."""

    def __init__(self, fetch: Callable[[int, int], tuple[bytes, int]]) -> None:
        self._fetch, self._position, self._size = fetch, 0, -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END and self._size < 0:
            self._read(1)
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        content = self._read(len(view))
        view[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return self._read(WHOLE_BYTES)  # in one request: RawIOBase would ask for 8 KiB at a time

    def _read(self, length: int) -> bytes:
        if 0 <= self._size <= self._position:
            return b""
        content, self._size = self._fetch(self._position, length)
        self._position += len(content)
        return content


# The end of the name of a file that could not be read.
ASIDE = ".unread"
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors of parsing what somebody else has written."""

Warn = Callable[[str], object]


def read_state(path: Path, parse: Callable[[bytes], T], warn: Warn) -> T | None:
    """Parse a file; None if it is missing. An unreadable one is moved aside.

    `parse` may raise MALFORMED. Raises OSError where the file cannot be moved.
    """
    try:
        return parse(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *MALFORMED):
        set_aside(path, warn)
        return None


def set_aside(path: Path, warn: Warn) -> None:
    """Rename whatever has this name, to one that nothing else has. Raises OSError."""
    aside = path.with_name(f"{path.name}.{time.time_ns()}{ASIDE}")
    path.rename(aside)
    warn(f"{path} cannot be read, or is of another version: it is set aside as {aside.name}, and written again")


def latest_set_aside(path: Path) -> Path | None:
    """Newest file that was moved aside from this name."""
    return max(path.parent.glob(f"{path.name}.*{ASIDE}"), default=None)
