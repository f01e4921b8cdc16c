"""SIGTERM and Ctrl-C ask for an orderly end: the handler only remembers, the program looks when it can stop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from simpletuner.errors import Stopped


class StopRequest:
    """The signal that asked this process to end; 0 while none did."""

    def __init__(self) -> None:
        self.signal_number = 0

    def check(self) -> None:
        """Raise Stopped if a signal came; for phases whose work is already safe on disk."""
        if self.signal_number:
            raise self.stopped("before training; what was prepared is kept")

    def stopped(self, where: str) -> Stopped:
        """Return the error that ends the run with 128 + the signal's number; SIGTERM if another rank was asked."""
        number = self.signal_number or int(signal.SIGTERM)
        return Stopped(
            number, f"stopped by {signal.Signals(number).name} {where}", "run the same command again to go on"
        )


PR_SET_PDEATHSIG = 1
"""Linux: send this process a signal when its parent dies; see `man 2 prctl`."""


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM when the launcher dies, even of SIGKILL: ranks then save, leave and free GPUs."""
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != launcher:  # it died just before
        os.kill(os.getpid(), signal.SIGTERM)


REPEAT_SECONDS = 1.0
"""Ctrl-C reaches a rank twice, from the terminal and from the launcher: within this time it is the same request."""


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Remember SIGINT and SIGTERM instead of dying of them; asking again ends the process."""
    request, first_asked = StopRequest(), 0.0

    def remember(number: int, _frame: object) -> None:
        """Note the signal; give up at once if it comes again."""
        nonlocal first_asked
        now = time.monotonic()
        if request.signal_number and now - first_asked > REPEAT_SECONDS:
            os._exit(128 + number)
        first_asked = first_asked or now
        request.signal_number = number

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
