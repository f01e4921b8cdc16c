"""The command line at a real terminal: what it draws is waited for, what a person would type is typed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

from patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent
SECONDS = PATIENCE


class Terminal:
    """A started command whose stdin, stdout and stderr are one terminal."""

    def __init__(self, folder: Path, *arguments: str, kind: str = "dumb", columns: int = 120) -> None:
        self.drawn, self.read_until = "", 0
        self.end, inside = pty.openpty()
        self.resize(columns)
        inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # it outranks a resize
        environment = {**inherited, "PYTHONPATH": str(ROOT), "TERM": kind, "HOME": str(folder)}
        command = [sys.executable, "-m", "simpletuner", *arguments]
        ends = {"stdin": inside, "stdout": inside, "stderr": inside}
        in_session = {"start_new_session": True, "preexec_fn": control_terminal}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **in_session, **ends)
        os.close(inside)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

    def read(self) -> None:
        """Take what is drawn, or the command would wait for somebody to look."""
        with contextlib.suppress(OSError):  # so Linux says that the command has ended
            while drawn := os.read(self.end, 65536):
                self.drawn += drawn.decode(errors="replace")

    def wait_for(self, text: str) -> str:
        """Return what is drawn from the last found text to the end of this one."""
        end = time.monotonic() + SECONDS
        wanted, alive = re.compile(re.escape(text)), True
        while (found := wanted.search(self.drawn, self.read_until)) is None:
            assert alive and time.monotonic() < end, f"no {text!r} after: {self.drawn[self.read_until :]}"
            time.sleep(0.01)
            if self.process.poll() is not None:
                self.reader.join(SECONDS)  # what it drew last may not have been read yet
                alive = False
        before, self.read_until = self.drawn[self.read_until : found.end()], found.end()
        return before

    def answer(self, question: str, keys: str) -> str:
        """Wait for a question, type, and return what was drawn before."""
        before = self.wait_for(question)
        self.press(keys + "\n")
        return before

    def press(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def ended(self) -> int:
        """Wait for the end, and return the exit code."""
        code = self.process.wait(SECONDS)
        self.reader.join(SECONDS)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(SECONDS)
        os.close(self.end)


def control_terminal() -> None:
    """Make stdin the controlling terminal of this session, so that Ctrl-C is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
