"""What processes use: CPU time and disk traffic, by which one that works is told from one that hangs (Linux)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
BUSY_SHARE = 0.05
"""A process that waits in a hung call uses less CPU than this: its threads only look at clocks."""
SAMPLE_SECONDS = 5.0
PAUSE_SECONDS = 10.0
"""Who has not asked for so long was stopped, as by Ctrl-Z, probably together with the others."""


@dataclass(frozen=True)
class Usage:
    """What a process and its descendants have used so far."""

    cpu_seconds: float
    disk: int
    """Bytes read from and written to disks, and pages that had to be fetched from there."""


def all_processes() -> dict[int, tuple[int, list[str]]]:
    """Return parent and status fields of every process; empty where there is no /proc."""
    found: dict[int, tuple[int, list[str]]] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(folder.name)] = int(fields[1]), fields
    return found


def usage_of(pid: int, processes: Mapping[int, tuple[int, list[str]]]) -> Usage | None:
    """Return what a process and its descendants have used; None where that cannot be told."""
    if pid not in processes:
        return None
    children: dict[int, list[int]] = {}
    for child, (parent, _) in processes.items():
        children.setdefault(parent, []).append(child)
    ticks = disk = 0
    pending = [pid]
    while pending:
        one = pending.pop()
        fields = processes[one][1]
        ticks += int(fields[11]) + int(fields[12])
        disk += int(fields[9]) + disk_bytes(one)
        pending += children.get(one, [])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), disk)


def disk_bytes(pid: int) -> int:
    """Return how much a process has read from and written to disks; 0 where that cannot be told."""
    try:
        lines = (PROC / str(pid) / "io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts.get("read_bytes", 0)) + int(counts.get("write_bytes", 0))


def state_of(pid: int) -> str:
    """Return the letter by which Linux names what a process is at, such as T for stopped; empty if unknown."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Meter:
    """Since when a process has made no progress: neither its phase moved, nor did it compute, read or write."""

    def __init__(self, sample_seconds: float = SAMPLE_SECONDS) -> None:
        self.sample_seconds = sample_seconds
        self.phase, self.usage = -1, Usage(0, 0)
        self.asked = self.sampled = self.active = time.monotonic()

    def idle_seconds(self, pid: int, phase: int) -> float:
        """Return for how long the process has made no progress."""
        now = time.monotonic()
        paused, self.asked = now - self.asked > PAUSE_SECONDS, now
        if phase != self.phase or paused:
            self.phase, self.active = phase, now
        elapsed = now - self.sampled
        # while phases move there is nothing to find out: looking through /proc takes up to 20 ms
        if min(elapsed, now - self.active) >= self.sample_seconds:
            usage = usage_of(pid, all_processes()) or self.usage
            busy = usage.cpu_seconds - self.usage.cpu_seconds > BUSY_SHARE * elapsed
            if busy or usage.disk != self.usage.disk:
                self.active = now
            self.usage, self.sampled = usage, now
        return now - self.active
