"""A filesystem whose server is down does not fail, it never answers: a thread looks whether the check still moves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simpletuner.errors import ExitCode
from simpletuner.tools.nfs.meeting import Meeting

SILENCE_SECONDS = 10.0


@contextmanager
def watched(meeting: Meeting, say: Callable[[str], None]) -> Iterator[None]:
    """Say when the filesystem has been silent for a while, and end the process when it stays so.

    The process ends as a failed check does: nothing else can be done, as the thread that waits hears no signals.
    """
    ending, told = threading.Event(), threading.Event()

    def watch() -> None:
        """Look twice a second for a sign of life."""
        while not ending.wait(0.5):
            silence = time.monotonic() - meeting.last_sign
            where = f"{meeting.place.path} has not answered for {silence:.0f} s (in `{meeting.stage}`)"
            if silence > meeting.timeout_seconds:
                say(f"error: {where}: given up")
                say(f"hint: is its file server up? findmnt -T {meeting.place.path}")
                os._exit(int(ExitCode.ENVIRONMENT))
            if silence > SILENCE_SECONDS and not told.is_set():
                told.set()
                say(f"{where}; waiting up to {meeting.timeout_seconds:g} s")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
