"""Find ranks that are stopped or hang, without taking long work for it.

A rank makes progress while its phase moves, or it or a child of it computes, reads or writes. One that does none of
that for a while is stalled if its heartbeat has stopped as well (it was stopped by a signal, a debugger, a freezer), or
if others are further on and wait for it. Waiting ranks are idle, too, but they are ahead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from simpletuner.launch.process_usage import SAMPLE_SECONDS, Meter, state_of
from simpletuner.launch.ranks import Ranks

STATES = {
    "T": "the process is stopped (SIGSTOP)",
    "t": "the process is held by a debugger",
    "D": "it waits for a disk or a driver",
}
"""By the letter of /proc/PID/stat."""


@dataclass(frozen=True)
class Stall:
    """A rank that makes no progress."""

    rank: int
    pid: int
    seconds: float
    doing: str
    state: str

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self.seconds))
        why = f": {STATES[self.state]}" if self.state in STATES else ""
        at = f", at {self.doing}" if self.doing else ", before it began"
        return (
            f"rank {self.rank} (pid {self.pid}) has made no progress for {self.seconds:.0f} s (since {since}){at}{why}"
        )


class StallDetector:
    """Watch the ranks of this machine."""

    def __init__(self, ranks: Ranks, stall_seconds: float) -> None:
        self.ranks, self.stall_seconds = ranks, stall_seconds
        sample = min(SAMPLE_SECONDS, stall_seconds / 8)
        self.meters = {rank: Meter(sample) for rank in ranks.processes}

    def find(self, phase_elsewhere: int = 0) -> Stall | None:
        """Return the rank that has made no progress for the longest time, if it is stalled.

        `phase_elsewhere` is how far the furthest rank of other machines is.
        """
        furthest, now = max(self.ranks.phase, phase_elsewhere), time.monotonic()
        stalls = []
        for rank, process in self.ranks.processes.items():
            if process.poll() is not None:
                continue
            pulse = self.ranks.pulses[rank]
            idle = self.meters[rank].idle_seconds(process.pid, pulse.phase)
            frozen = now - pulse.heard > self.stall_seconds
            behind = pulse.watched and pulse.phase < furthest
            if idle > self.stall_seconds and (frozen or behind):
                stalls.append(Stall(rank, process.pid, idle, pulse.doing, state_of(process.pid)))
        return max(stalls, key=lambda stall: stall.seconds, default=None)
