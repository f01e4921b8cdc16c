"""Find stopped or hanging ranks by their activity, not by the duration of a phase (Linux).

A rank makes progress while its phase advances, or while it or a child process uses CPU or disk. A rank
without progress for a while is stalled if its heartbeat has stopped as well (a signal, a debugger, a frozen
container), or if other ranks are further on and wait for it. Ranks that wait are idle too, but they are
ahead.

torch's flight recorder writes the last collectives of each rank into the run's folder when a collective of
NCCL times out, after 10 minutes. The launcher finds most hangs earlier, and asks the ranks for them before
ending them: only a stopped rank cannot answer. No torch at import.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.system.files.atomic import write_file

if TYPE_CHECKING:
    from simpletuner.launch.ranks import Ranks

# A process that waits in a hung call uses less CPU than this: its threads only poll.
BUSY_SHARE = 0.05
SAMPLE_SECONDS = 5.0
# Silence that means this process was stopped itself, as by Ctrl-Z, probably with the others.
PAUSE_SECONDS = 10.0
STATES: dict[str, str] = {  # by psutil's words; it takes 0.02 CPU s to import
    "stopped": "the process is stopped (SIGSTOP)",
    "tracing-stop": "the process is held by a debugger",
    "disk-sleep": "it waits for a disk or a driver",
}
PAUSED_STATES = ("stopped", "tracing-stop")
WARN_SECONDS = 10.0
"""Seconds of a rank's suspension before a warning."""
# Longest time to a rank's first heartbeat, if that is longer than stall_timeout. Until then it imports
# torch and this package, some 10,000 files: on a busy machine or from a network drive it may use next to no
# CPU for minutes.
BEGIN_SECONDS = 600.0


@dataclass(frozen=True)
class Usage:
    """CPU time and disk traffic of a process and its descendants so far."""

    cpu_seconds: float
    disk: int
    """Bytes read from and written to disks, plus major page faults."""


def usage_of(pid: int) -> Usage | None:
    """Sum the usage of a process and its descendants; None where it has ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    cpu_seconds, disk = 0.0, 0
    for each in family:
        # Errors: it has ended, it belongs to another user (AccessDenied), or macOS, which counts no disks.
        with suppress(psutil.Error, OSError, RuntimeError, AttributeError):
            times = each.cpu_times()
            cpu_seconds += times.user + times.system
            disk += major_faults(each.pid)
            counters = each.io_counters()
            disk += counters.read_bytes + counters.write_bytes
    return Usage(cpu_seconds, disk)


def major_faults(pid: int) -> int:
    # The only count of reads from mapped files on FUSE.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from state, proc(5)'s third
    return int(fields[9])  # which psutil leaves out


def state_of(pid: int) -> str:
    """Return psutil's word for the state of a process; empty if unknown."""
    import psutil

    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return ""


class ProgressMeter:
    """Measures for how long a process has made no progress: no new phase, no CPU, no disk."""

    def __init__(self, sample_seconds: float = SAMPLE_SECONDS) -> None:
        self.sample_seconds = sample_seconds
        self.phase, self.usage = -1, Usage(0, 0)
        self.asked = self.sampled = self.active = time.monotonic()

    def idle_seconds(self, pid: int, phase: int) -> float:
        now = time.monotonic()
        paused, self.asked = now - self.asked > PAUSE_SECONDS, now
        if phase != self.phase or paused:
            self.phase, self.active = phase, now
        elapsed = now - self.sampled
        # while phases advance there is nothing to find out: a look at all processes takes some 5 ms
        if min(elapsed, now - self.active) >= self.sample_seconds:
            usage = usage_of(pid) or self.usage
            busy = usage.cpu_seconds - self.usage.cpu_seconds > BUSY_SHARE * elapsed
            if busy or usage.disk != self.usage.disk:
                self.active = now
            self.usage, self.sampled = usage, now
        return now - self.active


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
    def __init__(self, ranks: Ranks, stall_seconds: float) -> None:
        self.ranks, self.stall_seconds = ranks, stall_seconds
        sample = min(SAMPLE_SECONDS, stall_seconds / 8)
        self.meters = {rank: ProgressMeter(sample) for rank in ranks.processes}
        self.paused: set[int] = set()
        """Ranks that `find_paused` has reported."""

    def find_paused(self) -> Iterator[Stall]:
        """Yield ranks that are stopped by a signal or held by a debugger, each once until it goes on."""
        now = time.monotonic()
        for rank, process in self.ranks.processes.items():
            status = self.ranks.statuses[rank]
            silent = now - status.received
            if silent < min(WARN_SECONDS, self.stall_seconds / 2):
                self.paused.discard(rank)
            elif rank not in self.paused and (state := state_of(process.pid)) in PAUSED_STATES:
                self.paused.add(rank)
                yield Stall(rank, process.pid, silent, status.doing, state)

    def find(self, phase_elsewhere: int = 0) -> Stall | None:
        """Return the stalled rank that has made no progress for the longest time, if there is one.

        `phase_elsewhere` is the phase of the furthest rank of other machines.
        """
        furthest, now = max(self.ranks.phase, phase_elsewhere), time.monotonic()
        stalls = []
        for rank, process in self.ranks.processes.items():
            if process.poll() is not None:
                continue
            status, state = self.ranks.statuses[rank], state_of(process.pid)
            idle = self.meters[rank].idle_seconds(process.pid, status.phase)
            limit = self.stall_seconds
            if not (status.has_begun or state in PAUSED_STATES):
                limit = max(limit, BEGIN_SECONDS)
            # | idle | heartbeat | phase                   | the rank                                       |
            # |------|-----------|-------------------------|------------------------------------------------|
            # | no   | any       | any                     | works, however long its phase takes            |
            # | yes  | stopped   | any                     | is frozen: a signal, a debugger, a container   |
            # | yes  | beats     | as far as the others    | waits: for the one that is behind, for a disk  |
            # | yes  | beats     | behind, always busy     | hangs, and the others wait for it              |
            # | yes  | beats     | behind, may wait itself | may flush to a slow disk or wait for a network |
            frozen = now - status.received > limit
            behind = status.watched and status.phase < furthest
            if idle > limit and (frozen or behind):
                stalls.append(Stall(rank, process.pid, idle, status.doing, state))
        return max(stalls, key=lambda stall: stall.seconds, default=None)


FILES = "flight_recorder_rank_"
PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path of torch's own dumps, to which it adds the rank."""
OLDER = {PREFIX: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE"}
"""Names that torch reads as well."""


def record_into(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Have torch record collectives, and write them into a folder when one times out. The user's variables
    stay.

    Call it before the process group is made.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # torch's default, which an older one may not have
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        PREFIX: str(prefix_in(folder, environment)),
    }
    for name, value in wanted.items():
        if name not in environment and OLDER.get(name, name) not in environment:
            environment[name] = value


def prefix_in(folder: Path, environment: Mapping[str, str]) -> Path:
    """Return the path of all dumps but for the ranks: the user's, or in the folder of a run."""
    return Path(environment.get(PREFIX) or environment.get(OLDER[PREFIX]) or folder.absolute() / FILES)


def write_records(prefix: Path, rank: int) -> None:
    """Write this rank's last collectives, as torch would, if there were any. Raises OSError."""
    from simpletuner.private_api.of_torch import flight_records

    if records := flight_records():
        write_file(prefix.with_name(f"{prefix.name}{rank}"), records)


def dumps_at(prefix: Path) -> dict[Path, int]:
    """Return the dumps that exist, with the times at which they were written, in nanoseconds."""
    try:
        return {path: path.stat().st_mtime_ns for path in prefix.parent.glob(f"{prefix.name}*[0-9]")}
    except OSError:
        return {}


def where_dumps_are(prefix: Path, before: Mapping[Path, int]) -> str:
    """Paths of new dumps, and the program that reads them; empty if there are none."""
    new = [path for path, written in dumps_at(prefix).items() if before.get(path) != written]
    if not new:
        return ""
    ranks = ", ".join(sorted((path.name.removeprefix(prefix.name) for path in new), key=lambda rank: (len(rank), rank)))
    compare = shlex.join(["torchfrtrace", str(prefix.parent), "--prefix", prefix.name])
    return (
        f"the last collectives of rank{'s' * (len(new) > 1)} {ranks} are in {prefix}*: `{compare}` compares those of "
        "NCCL, `python -m pickle FILE` prints any"
    )
