"""A rank's side of its connection to the launcher: heartbeats, why it failed, and what to do when the launcher dies.

It is a socket pair of this machine, not the store: no stranger can reach it, no other message can hold it up, and it
breaks the moment that the launcher dies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from simpletuner.launch.process_usage import Meter
from simpletuner.system.activity import Activity
from simpletuner.system.signals import StopRequest

LIFELINE = "_SIMPLETUNER_LIFELINE"
"""Variable that names the rank's end of the socket pair."""
BEAT_SECONDS = 1.0
SEND_SECONDS = 2.0
"""How long a message may wait for a launcher that is stopped, as by Ctrl-Z."""
ORPHAN_SECONDS = 8.0
"""How long a rank without a launcher may take to leave where nothing is lost by that."""
SAVE_SECONDS = 900.0
"""How long a rank without a launcher may take to save its last step."""


class Heartbeat:
    """A thread that sends a heartbeat every second; without a launcher (None) it does nothing."""

    def __init__(self, line: socket.socket | None, activity: Activity, stop: StopRequest, stall_seconds: float) -> None:
        self.line, self.activity, self.stop, self.stall_seconds = line, activity, stop, stall_seconds
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def has_launcher(self) -> bool:
        """Return whether a launcher of ours started this rank."""
        return self.line is not None

    def tell(self, **message: Any) -> None:
        """Send a message to the launcher, if there is one."""
        with suppress(OSError):
            if self.line is not None:
                self.line.send(json.dumps(message).encode())

    def _run(self) -> None:
        while not self.over.is_set():
            state = self.activity
            beat = {"phase": state.phase, "doing": state.doing, "unsaved": state.unsaved, "watched": state.watched}
            if self._is_cut(json.dumps({"beat": beat}).encode()):
                self._end_without_launcher()
            state.changed.wait(BEAT_SECONDS)
            state.changed.clear()

    def _is_cut(self, message: bytes) -> bool:
        """Send a message; return whether nobody is left to receive it."""
        assert self.line is not None
        try:
            self.line.send(message)
        except TimeoutError:
            return False
        except OSError:
            return not self.over.is_set()
        return False

    def _end_without_launcher(self) -> None:
        """Ask the main thread to stop, and end the process if it does not get on with that."""
        if not self.stop.signal_number:
            self.stop.signal_number = int(signal.SIGTERM)
        self.stop.may_exit = True
        meter, began = Meter(), time.monotonic()
        while not self.over.wait(BEAT_SECONDS / 4):
            idle = meter.idle_seconds(os.getpid(), self.activity.phase)
            waited = time.monotonic() - began
            lost_nothing = not self.activity.unsaved and waited > ORPHAN_SECONDS
            hangs = self.activity.unsaved and self.activity.watched and idle > self.stall_seconds
            if lost_nothing or hangs or waited > SAVE_SECONDS:
                os._exit(128 + self.stop.signal_number)


@contextmanager
def beating(
    environment: MutableMapping[str, str], activity: Activity, stop: StopRequest, stall_seconds: float
) -> Iterator[Heartbeat]:
    """Send heartbeats to the launcher that left its socket in the environment, if one did."""
    descriptor = environment.pop(LIFELINE, "")  # children of this process have no part in it
    if not descriptor:
        yield Heartbeat(None, activity, stop, stall_seconds)
        return
    os.set_inheritable(int(descriptor), False)
    stop.may_exit, stop.unsaved = False, None
    with socket.socket(fileno=int(descriptor)) as line:
        line.settimeout(SEND_SECONDS)
        heart = Heartbeat(line, activity, stop, stall_seconds)
        heart.thread.start()
        try:
            yield heart
        finally:
            heart.over.set()
