"""Why a run ends before its time, told alike on all machines."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from simpletuner.errors import ExitCode, PassedOn
from simpletuner.ops.launch.ranks import Death


@dataclass(frozen=True)
class Ending:
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
        return self.exit_code - 128 if self.exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) else 0

    def error(self, here: int, names: Sequence[str]) -> PassedOn:
        """Return what a machine is to say; elsewhere than where it began the sentence names the machine."""
        place = f"{names[self.machine]}: " if self.machine != here else ""
        return PassedOn(self.exit_code, place + self.sentence, self.hint)

    def is_explained_by(self, reason: str) -> bool:
        """Return whether what a rank has left in the store is about the same failure."""
        return bool(reason) and json.loads(reason)["exit_code"] == self.exit_code

    def with_reason(self, reason: str) -> Ending:
        """Return this ending with the sentence of the rank that brought it."""
        if not self.is_explained_by(reason):
            return self
        told = json.loads(reason)
        return replace(self, sentence=f"rank {told['rank']}: {told['message']}", hint=told["hint"])

    def as_json(self) -> str:
        """Return the ending as text."""
        return json.dumps(asdict(self))


def asked_to_stop(machine: int, number: int) -> Ending:
    """Return the ending that a signal to a launcher asks for."""
    return Ending(machine, 128 + number, f"stopped by {signal.Signals(number).name}", "run the same command to go on")


def rank_died(machine: int, death: Death) -> Ending:
    """Return the ending that a failed rank brings."""
    if death.code > 0:
        said = death.code in ExitCode.__members__.values()
        return Ending(machine, death.code, str(death), said=said)
    hint = "the kernel kills a process when memory runs out: see `dmesg`; run the same command to resume"
    return Ending(machine, int(ExitCode.TRAINING), str(death), hint)


def machine_is_silent(machine: int, name: str, seconds: float) -> Ending:
    """Return the ending that a machine brings which is not heard any more."""
    hint = "look at its output and its network, then run the same command on all machines to resume"
    return Ending(machine, int(ExitCode.TRAINING), f"{name} has been silent for {seconds:.0f} s", hint)
