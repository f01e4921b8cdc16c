"""Streams for stdout and stderr that never end a run: full disks, unread pipes, closed terminals."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simpletuner.errors import without_errno
from simpletuner.run_log import LOG, LOGGER, logs_of

# Errors after which a later line may be written: Python keeps the last 8 KiB until then. A pipe without a
# reader, or a terminal that was closed, does not come back.
PASSES = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
# Characters written at once: 4 bytes each fit into what poll(2) calls a writable pipe, 4 KiB.
CHUNK = 1024
PATIENCE_SECONDS = 10.0
"""Longest wait for a full pipe's reader, such as an unscrolled `less`, or a terminal after Ctrl-S."""


class LastingStream:
    """A standard stream that drops what cannot be written, and says so once in the log of the run."""

    def __init__(self, name: str) -> None:
        self.name, self.stream = name, getattr(sys, name)
        self.lost = ""
        """Why something was dropped, while the log of the run has not been told."""
        self.failed, self.waits = False, True

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._tell()
        try:
            self.stream.write(text[:0])  # refuses bytes: click tries b"", and would take this for binary
            for start in range(0, len(text), CHUNK):
                self._wait_for_reader()
                self.stream.write(text[start : start + CHUNK])
                self.stream.flush()
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._give_up(error)

    def _wait_for_reader(self) -> None:
        """Raise BlockingIOError if a write would wait: after 10 s, then at once until the reader reads."""
        poll = select.poll()
        try:
            poll.register(self.stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # no file of the operating system, as in tests, or a closed one
            return
        ready = bool(poll.poll(PATIENCE_SECONDS * 1000 if self.waits else 0))
        self.waits = ready
        if not ready:
            raise BlockingIOError(errno.EAGAIN, "nobody reads it")

    def _give_up(self, error: OSError) -> None:
        if not self.failed:
            self.failed, self.lost = True, without_errno(error)
        self._tell()
        if error.errno not in PASSES:
            self._redirect()

    def _tell(self) -> None:
        if self.lost and logs_of(LOGGER):  # else later: messages come before it is known which run this is
            LOGGER.info(f"warning: {self.name} cannot be written ({self.lost}): the run goes on, and {LOG} has all")
            self.lost = ""

    def _redirect(self) -> None:
        """Send what is printed from now on to /dev/null, also by C++ and at the end of the interpreter."""
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
            self.stream.flush()

    def leave(self) -> None:
        # The interpreter would end with 120 because of what cannot be written.
        try:
            self.stream.flush()
        except OSError:
            self._redirect()


@contextmanager
def lasting(*names: str) -> Iterator[None]:
    """Let no failed write to `sys.stdout` or `sys.stderr` (`names`) end what runs within."""
    streams = [LastingStream(name) for name in names]
    for stream in streams:
        setattr(sys, stream.name, stream)
    try:
        yield
    finally:
        for stream in streams:
            setattr(sys, stream.name, stream.stream)
            stream.leave()


def open_standard_streams() -> None:
    """Open what a shell has closed (`>&-`), and write characters that the encoding lacks as `\\xf6`."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the next file that is opened would get the number, and all that C++ prints
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
