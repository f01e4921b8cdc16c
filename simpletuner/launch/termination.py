"""Reasons for a run's early end, in equal words on all machines."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from simpletuner.errors import SIGNAL_CODES, ExitCode, RemoteFailure
from simpletuner.launch.ranks import ProcessExit
from simpletuner.launch.stall_detection import Stall
from simpletuner.launch.store import sanitize


@dataclass(frozen=True)
class Termination:
    """Why a run ends early, and the number of the machine that found it."""

    machine: int
    exit_code: int
    sentence: str
    hint: str = ""
    said: bool = False
    """True if a rank has printed the reason on that machine."""
    killed: bool = False
    """True if a signal has killed a rank, which has written nothing since."""
    stalled: bool = False
    """True if a rank hangs, so that what the others wait for is worth knowing."""

    @property
    def signal_number(self) -> int:
        """The signal that asked for a stop, which gives ranks time to save; 0 if it was something else."""
        return self.exit_code - 128 if self.exit_code in SIGNAL_CODES else 0

    def error(self, here: int, names: Sequence[str]) -> RemoteFailure:
        """Make the error to print on machine `here`; it names the machine if that is another one."""
        place = f"{names[self.machine]}: " if self.machine != here else ""
        return RemoteFailure(self.exit_code, place + self.sentence, self.hint)

    def is_explained_by(self, reason: Mapping[str, object]) -> bool:
        """True if a rank's last message, sent before it exited, is about the same failure."""
        return bool(reason) and reason["exit_code"] == self.exit_code

    def with_reason(self, reason: Mapping[str, object]) -> Termination:
        """Use the sentence of the rank that failed, if it sent one."""
        if not self.is_explained_by(reason):
            return self
        return replace(self, sentence=f"rank {reason['rank']}: {reason['message']}", hint=reason["hint"])

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def parse_termination(values: Mapping[str, object], machines: int) -> Termination | None:
    match values:
        case {"machine": int(machine), "exit_code": int(code), "sentence": str(sentence), "hint": str(hint)}:
            if not 0 <= machine < machines:
                return None
            flags = {name: values.get(name) is True for name in ("said", "killed", "stalled")}
            return Termination(machine, failure_code(code), sanitize(sentence), sanitize(hint), **flags)
    return None


def failure_code(code: int) -> int:
    """Map exit codes that are not ours to the code of a failed training."""
    # a run that ends early has not succeeded, whatever another machine, or a stranger, claims: never 0
    known = code in ExitCode.__members__.values() and code != ExitCode.OK
    return code if known else int(ExitCode.TRAINING)


def launcher_signaled(machine: int, number: int) -> Termination:
    return Termination(
        machine, 128 + number, f"stopped by {signal.Signals(number).name}", "run the same command to go on"
    )


def rank_failed(machine: int, failure: ProcessExit) -> Termination:
    if failure.code > 0:
        said = failure.code in ExitCode.__members__.values()
        return Termination(machine, failure.code, str(failure), said=said)
    if failure.code == -signal.SIGABRT:
        hint = "see its output: torch aborts a rank whose collective takes 10 minutes; run the same command to resume"
    else:
        hint = "the kernel kills a process when memory runs out: see `dmesg`; run the same command to resume"
    return Termination(machine, int(ExitCode.TRAINING), str(failure), hint, killed=True)


def rank_hangs_after_failing(machine: int, reason: Mapping[str, Any]) -> Termination:
    return Termination(machine, failure_code(reason["exit_code"]), f"rank {reason['rank']} failed").with_reason(reason)


def rank_stalled(machine: int, stall: Stall) -> Termination:
    hint = "look at its disks, driver and debugger, then run the same command to resume; --stall_timeout sets the limit"
    return Termination(machine, int(ExitCode.TRAINING), str(stall), hint, stalled=True)


def machine_silent(machine: int, name: str, seconds: float) -> Termination:
    hint = "look at its output and its network, then run the same command on all machines to resume"
    return Termination(machine, int(ExitCode.TRAINING), f"{name} has been silent for {seconds:.0f} s", hint)
