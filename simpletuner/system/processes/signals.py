"""Graceful shutdown on Ctrl-C, SIGTERM and SIGHUP: a thread confirms at once, the program stops where it can.

A first signal requests a stop with a checkpoint; a second one, at least a second later, exits without saving.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from simpletuner.errors import Stopped
from simpletuner.report import Report

# Schedulers and terminals may signal both a process and its group: within this time it is one request.
REPEAT_SECONDS = 1.0
WORTH_SAYING_SECONDS = 5.0
"""Seconds of a save from which on messages mention it."""


class StopRequest:
    """The signal that asked this process to stop; `signal_number` is 0 while there is none."""

    def __init__(self, unsaved: Callable[[], int] | None = None) -> None:
        self.signal_number, self.requested_at = 0, 0.0
        self.unsaved = unsaved
        """The step that is finished and saved before exit, 0 for none and -1 for one whose number is not
        known; None where another process prints the confirmation."""
        self.save_seconds: Callable[[], float] = lambda: 0.0
        """Returns the seconds that saving will take; 0 where that is not known."""
        self.is_announced = False
        """True while the signal of a machine that is about to be taken away is still to come."""
        self.when_asked: Callable[[], None] = lambda: None
        """Called once, when the first signal has been confirmed."""
        self.before_exit: Callable[[str], None] = lambda sentence: None
        """Called when a second signal ends this process, with the sentence that says so."""
        self.may_exit = True
        """True if a second signal exits this process. Not in ranks: their launcher kills them."""

    def check(self) -> None:
        """Raise Stopped if a signal came; for phases whose work is already safe on disk."""
        if self.signal_number:
            raise self.stopped("before training; what was prepared is kept")

    def stopped(self, where: str) -> Stopped:
        """Error that exits with 128 + the signal's number; SIGTERM if another rank received it."""
        number = self.signal_number or int(signal.SIGTERM)
        return Stopped(
            number, f"stopped by {signal.Signals(number).name} {where}", "run the same command again to go on"
        )

    def announce(self) -> None:
        # The announced SIGTERM must then not interrupt saving.
        self.is_announced = not self.signal_number
        self.receive(int(signal.SIGTERM))

    def receive(self, number: int) -> None:
        """Handle a signal: the first one requests a stop, a second one exits without saving."""
        if not self.signal_number:
            self.requested_at, self.signal_number = time.monotonic(), number
            self.confirm(number)
            self.when_asked()
        elif self.is_announced and number == signal.SIGTERM:
            self.is_announced = False
        elif self.may_exit and time.monotonic() - self.requested_at > REPEAT_SECONDS:
            self.exit_now(number)

    def confirm(self, number: int) -> None:
        if self.unsaved is None:
            return
        again = "press Ctrl-C again" if number == signal.SIGINT else "signal again"
        unsaved = self.unsaved()
        leave = "leave without saving" if unsaved else "leave at once"
        print_line(f"stopping: {stop_announcement(unsaved, self.save_seconds())}; {again} to {leave}")

    def exit_now(self, number: int) -> NoReturn:
        """Exit without saving, even while the main thread is blocked in a library."""
        sentence = "stopped without saving" if self.unsaved is not None and self.unsaved() else "stopped"
        self.before_exit(f"{sentence}, by a second {signal.Signals(number).name}")
        if self.unsaved is not None:
            print_line(sentence)
        os._exit(128 + number)  # sys.exit in this thread would only end the thread


def stop_announcement(unsaved: int, save_seconds: float) -> str:
    """Announcement of the actions before a run stops; `unsaved` and `save_seconds`: see StopRequest."""
    if not unsaved:
        return "what is done is kept"
    # Or the step after it, since the wish to stop is read with the loss, one step late (step_logger.py).
    takes = f", which takes about {save_seconds:.0f} s" if save_seconds >= WORTH_SAYING_SECONDS else ""
    return f"finishing {f'step {unsaved}' if unsaved > 0 else 'this step'}, then saving a checkpoint{takes}"


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Exit at once on Ctrl-C, while there is nothing to lose: KeyboardInterrupt aborts the process where
    an extension module such as torch's is being initialized (`terminate called after throwing an instance
    of ...`)."""

    def leave(number: int, frame: object) -> NoReturn:
        if "RANK" not in os.environ:  # for ranks, their launcher prints it
            print_line("stopped by SIGINT")
        os._exit(128 + number)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_line(text: str) -> None:
    with suppress(OSError):
        Report().confirm_stop(text)


@contextmanager
def handle_stop_signals(unsaved: Callable[[], int] | None = None) -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM and SIGHUP into a StopRequest, except SIGHUP where it is ignored, as under
    `nohup`.

    `unsaved`: see StopRequest.
    """
    # Python runs signal handlers in the main thread, which may be blocked in a library for minutes. The
    # wakeup descriptor is written immediately, so a thread that reads it can respond.
    request = StopRequest(unsaved)
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    thread = threading.Thread(target=dispatch_signals, args=(reading, request, numbers), name="signals", daemon=True)
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    former = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    parent = os.getpid()

    def restore() -> None:
        signal.set_wakeup_fd(former)
        for number, handler in before.items():
            signal.signal(number, handler)

    def restore_in_child() -> None:
        # a forked child shares the descriptor: a signal to it would otherwise stop its parent
        if os.getppid() == parent and writing.fileno() >= 0:
            restore()

    os.register_at_fork(after_in_child=restore_in_child)
    thread.start()
    try:
        yield request
    finally:
        restore()
        writing.close()  # ends the thread
        thread.join(REPEAT_SECONDS)


def dispatch_signals(reading: socket.socket, request: StopRequest, numbers: Sequence[int]) -> None:
    """Pass signals on as they arrive, until the other end of the socket pair is closed."""
    with reading:
        while received := reading.recv(64):
            for number in received:
                if number in numbers:
                    request.receive(number)


# Linux: send this process a signal when its parent dies; see `man 2 prctl`.
PR_SET_PDEATHSIG = 1


def terminate_with_parent() -> None:
    """Make the kernel send SIGTERM when the launcher dies, so that ranks save, exit and free GPUs."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # 4 ms of each command

    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != launcher:  # it died before prctl took effect
        os.kill(os.getpid(), signal.SIGTERM)
