"""What clears up after a process that was killed where nothing can be caught."""

from __future__ import annotations

import os
import signal
from types import TracebackType

from simpletuner.tools.nfs.place import CARD, Place, read_json


class Janitor:
    """A small process of its own that clears up after this one, should it be killed where nothing can be caught.

    It sleeps in a read of a pipe, whose other end only this process holds: the kernel closes it at any death.
    """

    def __init__(self, place: Place, rank: int, token: str) -> None:
        reading, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            watch(reading, place, rank, token)
        os.close(reading)

    def __enter__(self) -> Janitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the janitor home: this process has cleared up itself."""
        os.write(self.pipe, b"x")
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


def watch(pipe: int, place: Place, rank: int, token: str) -> None:
    """Wait for the parent's end, clear up if it came without a word, and end this process."""
    try:
        os.setsid()
        os.chdir("/")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # whoever reads the parent's output waits until all copies of it are closed
            os.dup2(nothing, standard)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        if os.read(pipe, 1) == b"" and is_owner(place, rank, token):
            place.leave(rank)
    finally:
        os._exit(0)


def is_owner(place: Place, rank: int, token: str) -> bool:
    """Return whether the rank is still the killed process's; a card that is not whole can only be its own."""
    card = read_json(place.own(rank, CARD))
    return card is None or card["token"] == token
