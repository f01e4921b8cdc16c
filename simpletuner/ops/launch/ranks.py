"""The processes of this machine's ranks: start them, notice how they end, end them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from simpletuner.errors import EnvironmentFault
from simpletuner.ops.launch.plan import Plan

KILL_SECONDS = 10
"""How long a killed process may take to vanish; one that waits for a broken disk or GPU driver never does."""


@dataclass(frozen=True)
class Death:
    """A rank that ended otherwise than it should: a negative code is the signal that killed it."""

    rank: int
    pid: int
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} (pid {self.pid}) was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} (pid {self.pid}) ended with exit code {self.code}"


class Ranks:
    """The ranks of one machine, started by entering the context; none is left behind when it is left."""

    def __init__(self, plan: Plan, inherited: Mapping[str, str]) -> None:
        self.plan, self.inherited = plan, inherited
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Ranks:
        try:
            for rank, environment in zip(self.plan.ranks, self.plan.environments(), strict=True):
                self.processes[rank] = subprocess.Popen(self.plan.command, env={**self.inherited, **environment})
        except OSError as error:
            self.kill()
            raise EnvironmentFault(f"cannot start all ranks: {error.strerror}", "free memory or processes") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def alive(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes that still run."""
        return [process for process in self.processes.values() if process.poll() is None]

    def first_death(self) -> Death | None:
        """Return a rank that has failed, if any has; rather one that was killed than one that missed it."""
        failed = [(process.returncode, rank) for rank, process in self.processes.items() if process.poll()]
        return Death(min(failed)[1], self.processes[min(failed)[1]].pid, min(failed)[0]) if failed else None

    def ask(self, number: int) -> None:
        """Send a signal to all that still run."""
        for process in self.alive:
            process.send_signal(number)

    def kill(self) -> None:
        """End all that still run, without asking."""
        self.ask(signal.SIGKILL)
        end = time.monotonic() + KILL_SECONDS
        while self.alive and time.monotonic() < end:
            time.sleep(0.01)


def inherited_environment() -> dict[str, str]:
    """Return what ranks inherit from this process; taken before anything here is set for the launcher alone."""
    return dict(os.environ)
