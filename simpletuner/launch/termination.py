"""Why a run ends before its time, said alike on all machines."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from simpletuner.errors import SIGNAL_CODES, ExitCode, RemoteFailure
from simpletuner.launch.ranks import ProcessExit
from simpletuner.launch.signing import printable
from simpletuner.launch.stall_detection import Stall


@dataclass(frozen=True)
class Termination:
    """Why a run ends, and on which machine that was found."""

    machine: int
    exit_code: int
    sentence: str
    hint: str = ""
    said: bool = False
    """Whether a rank of that machine has said it there."""

    @property
    def signal_number(self) -> int:
        """Return the signal that asked for an orderly end, which gives ranks time to save; 0 if none did."""
        return self.exit_code - 128 if self.exit_code in SIGNAL_CODES else 0

    def error(self, here: int, names: Sequence[str]) -> RemoteFailure:
        """Return what a machine is to say; elsewhere than where it began the sentence names the machine."""
        place = f"{names[self.machine]}: " if self.machine != here else ""
        return RemoteFailure(self.exit_code, place + self.sentence, self.hint)

    def is_explained_by(self, reason: Mapping[str, Any]) -> bool:
        """Return whether what a rank of this machine sent before it ended is about the same failure."""
        return bool(reason) and reason["exit_code"] == self.exit_code

    def with_reason(self, reason: Mapping[str, Any]) -> Termination:
        """Return this ending with the sentence of the rank that brought it."""
        if not self.is_explained_by(reason):
            return self
        return replace(self, sentence=f"rank {reason['rank']}: {reason['message']}", hint=reason["hint"])

    def as_json(self) -> dict[str, Any]:
        """Return the ending as plain values."""
        return asdict(self)


def parse_termination(values: Mapping[str, Any] | None, machines: int) -> Termination | None:
    """Return the ending that another machine wrote; None if it is none.

    A run that ends early has not succeeded, whatever is claimed: only our exit codes but 0 are taken.
    """
    match values:
        case {"machine": int(machine), "exit_code": int(code), "sentence": str(sentence), "hint": str(hint)}:
            if not 0 <= machine < machines:
                return None
            return Termination(
                machine, failure_code(code), printable(sentence), printable(hint), values.get("said") is True
            )
    return None


def failure_code(code: int) -> int:
    """Return an exit code from elsewhere if it is one of ours for a failure, else that of a failed training."""
    known = code in ExitCode.__members__.values() and code != ExitCode.OK
    return code if known else int(ExitCode.TRAINING)


def asked_to_stop(machine: int, number: int) -> Termination:
    """Return the ending that a signal to a launcher asks for."""
    return Termination(
        machine, 128 + number, f"stopped by {signal.Signals(number).name}", "run the same command to go on"
    )


def rank_died(machine: int, death: ProcessExit) -> Termination:
    """Return the ending that a failed rank brings."""
    if death.code > 0:
        said = death.code in ExitCode.__members__.values()
        return Termination(machine, death.code, str(death), said=said)
    hint = "the kernel kills a process when memory runs out: see `dmesg`; run the same command to resume"
    return Termination(machine, int(ExitCode.TRAINING), str(death), hint)


def rank_hangs_after_failing(machine: int, reason: Mapping[str, Any]) -> Termination:
    """Return the ending that a rank brings which has said why it failed, but cannot end."""
    return Termination(machine, failure_code(reason["exit_code"]), f"rank {reason['rank']} failed").with_reason(reason)


def rank_stalled(machine: int, stall: Stall) -> Termination:
    """Return the ending that a rank brings which makes no progress."""
    hint = "look at its disks, driver and debugger, then run the same command to resume; --stall_timeout sets the limit"
    return Termination(machine, int(ExitCode.TRAINING), str(stall), hint)


def machine_is_silent(machine: int, name: str, seconds: float) -> Termination:
    """Return the ending that a machine brings which is not heard any more."""
    hint = "look at its output and its network, then run the same command on all machines to resume"
    return Termination(machine, int(ExitCode.TRAINING), f"{name} has been silent for {seconds:.0f} s", hint)
