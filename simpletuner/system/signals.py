"""Ctrl-C, SIGTERM and SIGHUP ask for an orderly end: a thread answers at once, the program looks when it can stop."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from simpletuner.errors import Stopped
from simpletuner.report import Report

REPEAT_SECONDS = 1.0
"""Schedulers and terminals may signal twice, the process and its group: within this time it is the same request."""


class StopRequest:
    """The signal that asked this process to end; 0 while none did."""

    def __init__(self, unsaved: Callable[[], bool] | None = None) -> None:
        self.signal_number, self.first_asked = 0, 0.0
        self.unsaved = unsaved
        """Whether a checkpoint is saved before the end; None: another process answers."""
        self.before_giving_up: Callable[[], None] = lambda: None
        self.may_give_up = True
        """Whether a second signal ends this process; a rank is ended by its launcher."""

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

    def ask(self, number: int) -> None:
        """Take a request to stop: the first is answered, a second one ends the process without saving."""
        if number == signal.SIGHUP:
            release_lost_terminal()
        if not self.signal_number:
            self.first_asked, self.signal_number = time.monotonic(), number
            self.answer(number)
        elif self.may_give_up and time.monotonic() - self.first_asked > REPEAT_SECONDS:
            self.give_up(number)

    def answer(self, number: int) -> None:
        """Say what happens next."""
        if self.unsaved is None:
            return
        again = "press Ctrl-C again" if number == signal.SIGINT else "signal again"
        if self.unsaved():
            say(f"stopping: saving a checkpoint after this step; {again} to stop without saving")
        else:
            say(f"stopping: what was prepared is kept; {again} to stop at once")

    def give_up(self, number: int) -> NoReturn:
        """End this process at once, whatever its main thread waits for."""
        self.before_giving_up()
        if self.unsaved is not None:
            say("stopped without saving")
        if sys.stderr.isatty():
            with suppress(OSError):
                os.write(2, b"\x1b[?25h")  # the progress bar hides the cursor
        os._exit(128 + number)


def say(text: str) -> None:
    """Print a line from the thread of signals; on a terminal below the `^C`, or the progress bar."""
    with suppress(OSError):
        Report().say(f"\n{text}" if sys.stderr.isatty() else text)


@contextmanager
def listening(unsaved: Callable[[], bool] | None = None) -> Iterator[StopRequest]:
    """Take SIGINT, SIGTERM and SIGHUP as requests to stop, unless SIGHUP is ignored, as under `nohup`.

    Python runs handlers in the main thread, which may be blocked in a library for minutes; the file descriptor that
    is written at once lets a thread answer. `unsaved`: see StopRequest.
    """
    request = StopRequest(unsaved)
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    thread = threading.Thread(target=take_requests, args=(reading, request, numbers), name="signals", daemon=True)
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    former = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    parent = os.getpid()

    def restore() -> None:
        """Put back what was there before."""
        signal.set_wakeup_fd(former)
        for number, handler in before.items():
            signal.signal(number, handler)

    def restore_in_child() -> None:
        """Let a forked child, which shares the descriptor, not speak for its parent."""
        if os.getppid() == parent and writing.fileno() >= 0:
            restore()

    os.register_at_fork(after_in_child=restore_in_child)
    thread.start()
    try:
        with losable_terminal():
            yield request
    finally:
        restore()
        writing.close()  # ends the thread
        thread.join(REPEAT_SECONDS)


def take_requests(reading: socket.socket, request: StopRequest, numbers: Sequence[int]) -> None:
    """Hand over each signal as it comes, until the other end is closed."""
    with reading:
        while received := reading.recv(64):
            for number in received:
                if number in numbers:
                    request.ask(number)


class LosableTerminal:
    """A terminal that may be closed while this process goes on to save: what cannot be shown is dropped."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, if there is still somewhere to write."""
        with suppress(OSError):
            return self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if there is still somewhere to write."""
        with suppress(OSError):
            self.stream.flush()


@contextmanager
def losable_terminal() -> Iterator[None]:
    """Survive that the terminal is closed: writing to it then fails, shortly before SIGHUP says so."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (LosableTerminal(stream) if stream.isatty() else stream for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def release_lost_terminal() -> None:
    """Let stdout and stderr lead nowhere where their terminal was closed."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


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
