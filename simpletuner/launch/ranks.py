"""The processes of this machine's ranks: start them, hear from them, notice how they end, end them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.launch.heartbeat import LIFELINE

KILL_SECONDS = 10
"""How long a killed process may take to vanish; one that waits for a broken disk or GPU driver never does."""
MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class ProcessExit:
    """A rank that ended otherwise than it should: a negative code is the signal that killed it."""

    rank: int
    pid: int
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} (pid {self.pid}) was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} (pid {self.pid}) ended with exit code {self.code}"


@dataclass
class RankStatus:
    """What a rank last sent of itself, and when."""

    heard: float
    phase: int = 0
    doing: str = ""
    unsaved: bool = False
    watched: bool = False


class Ranks:
    """The ranks of one machine; none is left behind when the context of `started` is left."""

    def __init__(self, inherited: Mapping[str, str]) -> None:
        self.inherited = inherited
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.lines: dict[int, socket.socket] = {}
        self.pulses: dict[int, RankStatus] = {}
        self.reason: dict[str, Any] = {}
        """What the first rank of this machine that failed has sent of that."""
        self.failed_at = 0.0
        self.lost_contact = False

    @contextmanager
    def started(self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> Iterator[None]:
        """Start a command once per rank. Raises EnvironmentFault when there is no room for all."""
        try:
            try:
                for rank, environment in environments.items():
                    self._start(rank, command, environment)
            except OSError as error:
                hint = "free memory or processes"
                raise EnvironmentNotReady(f"cannot start all ranks: {error.strerror}", hint) from None
            yield
        finally:
            self.kill()
            for line in self.lines.values():
                line.close()

    def _start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one rank, connected to this process by a socket pair."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        self.lines[rank], self.pulses[rank] = ours, RankStatus(time.monotonic())
        with theirs:
            variables = {**self.inherited, **environment, LIFELINE: str(theirs.fileno())}
            self.processes[rank] = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()])

    @property
    def alive(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes that still run."""
        return [process for process in list(self.processes.values()) if process.poll() is None]

    @property
    def phase(self) -> int:
        """Return how far the furthest rank of this machine is."""
        return max((pulse.phase for pulse in self.pulses.values()), default=0)

    def listen(self) -> None:
        """Take what the ranks have sent since the last time."""
        for rank, line in self.lines.items():
            try:
                while message := line.recv(MESSAGE_BYTES):
                    self._take(rank, json.loads(message))
            except (OSError, ValueError):  # nothing more to read, or the rank has ended
                continue

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        if "beat" in message:
            self.pulses[rank] = RankStatus(time.monotonic(), **message["beat"])
        if "reason" in message and not self.reason:
            self.reason, self.failed_at = {"rank": rank, **message["reason"]}, time.monotonic()
        self.lost_contact = self.lost_contact or "lost" in message

    def unsaved(self) -> bool:
        """Return whether any rank has trained steps that no checkpoint holds yet."""
        return any(pulse.unsaved for pulse in list(self.pulses.values()))

    def first_death(self) -> ProcessExit | None:
        """Return a rank that has failed, if any has; rather one that was killed than one that missed it."""
        failed = [(process.returncode, rank) for rank, process in self.processes.items() if process.poll()]
        return ProcessExit(min(failed)[1], self.processes[min(failed)[1]].pid, min(failed)[0]) if failed else None

    def ask(self, number: int) -> None:
        """Send a signal to all that still run."""
        for process in self.alive:
            process.send_signal(number)

    def kill(self) -> None:
        """End all that still run, stopped ones as well, without asking."""
        self.ask(signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        while self.alive and time.monotonic() < end:
            time.sleep(0.01)


def inherited_environment() -> dict[str, str]:
    """Return what ranks inherit from this process; taken before anything here is set for the launcher alone."""
    return dict(os.environ)
