"""The rank processes of this machine: start them, receive their messages, notice how they exit, kill them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from simpletuner.errors import EnvironmentNotReady
from simpletuner.launch.plan import SOCKET_VARIABLE
from simpletuner.system.files.paths import descriptor_of

# Longest wait for a killed process; one that waits for a broken disk or driver never ends.
KILL_SECONDS = 10
MESSAGE_BYTES = 1 << 16
# Longest wait for ranks that write their last collectives: they look once a second whether they should.
DUMP_SECONDS = 5.0
# Time without heartbeat after which a rank is not waited for.
SILENT_SECONDS = 3.0


@dataclass(frozen=True)
class ProcessExit:
    """A rank that exited with an error; a negative code is the signal that killed it."""

    rank: int
    pid: int
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} (pid {self.pid}) was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} (pid {self.pid}) ended with exit code {self.code}"


@dataclass
class RankStatus:
    """Last heartbeat of a rank, with the time of receipt; the fields are Activity's."""

    received: float
    phase: int = 0
    doing: str = ""
    unsaved: int = 0
    watched: bool = False
    save_seconds: float = 0.0
    has_begun: bool = True
    """False until the first heartbeat: before it, a rank imports torch and this package, which sends none."""


class Ranks:
    """The ranks of one machine; none is left running when the context of `started` ends."""

    def __init__(self, inherited: Mapping[str, str]) -> None:
        self.inherited = inherited
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.sockets: dict[int, socket.socket] = {}
        self.statuses: dict[int, RankStatus] = {}
        self.reason: dict[str, Any] = {}
        """Why the first rank of this machine failed, as that rank sent it."""
        self.failed_at = 0.0
        self.lost_contact = False
        self.dumped: set[int] = set()
        """Ranks that have answered `request_dumps`."""

    @contextmanager
    def started(self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> Iterator[None]:
        """Start a command once per rank. Raises EnvironmentNotReady when a process cannot be started."""
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
            for connection in self.sockets.values():
                connection.close()

    def _start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # datagrams keep their boundaries: every recv is one message
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The launcher must never wait for a rank.
        ours.setblocking(False)
        self.sockets[rank], self.statuses[rank] = ours, RankStatus(time.monotonic(), has_begun=False)
        with theirs:
            variables = {**self.inherited, **environment, SOCKET_VARIABLE: str(theirs.fileno())}
            self.processes[rank] = subprocess.Popen(
                command, env=variables, pass_fds=[theirs.fileno(), *named_descriptors(command)]
            )

    @property
    def alive(self) -> list[subprocess.Popen[bytes]]:
        """The processes that are running."""
        return [process for process in list(self.processes.values()) if process.poll() is None]

    @property
    def phase(self) -> int:
        return max((status.phase for status in self.statuses.values()), default=0)

    def receive(self) -> None:
        """Read all messages that the ranks have sent since the last call."""
        for rank, connection in self.sockets.items():
            try:
                while message := connection.recv(MESSAGE_BYTES):
                    self._handle(rank, json.loads(message))
            except (OSError, ValueError):  # nothing more to read, or the rank has exited
                continue

    def _handle(self, rank: int, message: Mapping[str, Any]) -> None:
        if "status" in message:
            self.statuses[rank] = RankStatus(time.monotonic(), **message["status"])
        if "reason" in message and not self.reason:
            self.reason, self.failed_at = {"rank": rank, **message["reason"]}, time.monotonic()
        self.lost_contact = self.lost_contact or "lost_contact" in message
        if "dumped" in message:
            self.dumped.add(rank)

    def unsaved(self) -> int:
        """Return -1 if any rank has trained steps that are not in a checkpoint yet, else 0: see
        StopRequest.unsaved.

        The number of the step in a heartbeat is up to a second old.
        """
        return -any(status.unsaved for status in list(self.statuses.values()))

    def save_seconds(self) -> float:
        """Seconds of the slowest rank's save; 0 if unknown."""
        return max((status.save_seconds for status in list(self.statuses.values())), default=0.0)

    def first_failure(self) -> ProcessExit | None:
        # A killed one first: others fail because they miss it.
        # signals are negative codes, so the least code is a kill
        failed = [(process.returncode, rank) for rank, process in self.processes.items() if process.poll()]
        return ProcessExit(min(failed)[1], self.processes[min(failed)[1]].pid, min(failed)[0]) if failed else None

    def request_dumps(self) -> None:
        """Ask all ranks to dump their last collectives, and wait for those that send heartbeats."""
        began = time.monotonic()
        for connection in self.sockets.values():
            with suppress(OSError):
                connection.send(b"d")
        while time.monotonic() < began + DUMP_SECONDS:
            self.receive()
            answering = [rank for rank, status in self.statuses.items() if began - status.received < SILENT_SECONDS]
            if all(rank in self.dumped or self.processes[rank].poll() is not None for rank in answering):
                return
            time.sleep(0.05)

    def send_signal(self, number: int) -> None:
        for process in self.alive:
            process.send_signal(number)

    def kill(self) -> None:
        """Kill all ranks, stopped ones as well."""
        self.send_signal(signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        while self.alive and time.monotonic() < end:
            time.sleep(0.01)


def named_descriptors(command: Sequence[str]) -> list[int]:
    # Ranks inherit no other files.
    found = (descriptor_of(argument.partition("=")[2]) for argument in command)
    return [number for number in found if number is not None]


def inherited_environment() -> dict[str, str]:
    """Copy the environment for the ranks, before variables are set that are for the launcher alone."""
    return dict(os.environ)
