"""Reasons for a run's early end, in equal words on all machines; and a cloud's notices of preemption."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Any

from simpletuner.errors import SIGNAL_CODES, ExitCode, RemoteFailure, without_errno
from simpletuner.launch.ranks import ProcessExit
from simpletuner.launch.stall_detection import Stall
from simpletuner.launch.store import sanitize
from simpletuner.report import Report
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.network import http_request
from simpletuner.system.processes.signals import StopRequest


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

    def as_json(self) -> dict[str, Any]:
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


# Polling interval that AWS recommends (two minutes' notice); Google and Azure give 30 s.
ASK_SECONDS = 5.0
ANSWER_SECONDS = 5.0
NO_NOTICE = (HTTPStatus.NOT_FOUND, HTTPStatus.NO_CONTENT)
# Exit codes of a shell whose command is no program, or is not there.
CANNOT_RUN = (126, 127)


@dataclass(frozen=True)
class Answer:
    """Knowledge of a machine's end; `problem` says why nothing is."""

    is_taken_away: bool
    problem: str = ""


def ask(check: str) -> Answer:
    try:
        return ask_address(check) if check.startswith(("http://", "https://")) else ask_command(check)
    except subprocess.TimeoutExpired:
        return Answer(False, f"has not answered within {ANSWER_SECONDS:.0f} s")
    except (OSError, ValueError) as error:
        return Answer(False, f"cannot be asked: {without_errno(error)}")


def ask_command(command: str) -> Answer:
    done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS)
    if done.returncode in CANNOT_RUN:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return Answer(False, f"cannot be run: {said[-1] if said else f'exit code {done.returncode}'}")
    return Answer(done.returncode == 0)


def ask_address(url: str) -> Answer:
    import urllib.request
    from urllib.error import HTTPError, URLError

    # Without the proxy of the environment, which has another machine's metadata or none.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(http_request(url), timeout=ANSWER_SECONDS) as answer:
            return Answer(answer.status == HTTPStatus.OK)
    except HTTPError as error:
        error.close()  # it holds the connection
        return Answer(False, "" if error.code in NO_NOTICE else f"answers with the status {error.code}")
    except URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else error
        return Answer(False, f"cannot be reached: {without_errno(reason)}")


def check_of_machine(launch: Launch, environment: Mapping[str, str]) -> str:
    # Where a launcher of ours runs, it makes the check.
    return launch.preemption_check if environment.get("LOCAL_RANK", "0") == "0" else ""


@contextmanager
def watch_preemption(check: str, stop: StopRequest) -> Iterator[None]:
    """Ask from a thread, and request a stop when the machine will be taken away; do nothing without a check.

    An answer that says nothing is one warning.
    """
    ended = threading.Event()

    def watch() -> None:
        warned, answer = False, ask(check)
        while not answer.is_taken_away:
            if answer.problem and not warned:
                warned = True
                Report().warn(f"preemption_check {answer.problem}", "it is asked again every 5 s")
            if ended.wait(ASK_SECONDS):
                return
            answer = ask(check)
        if not ended.is_set():
            Report().say("preemption_check: this machine will be taken away")
            stop.announce()

    if check:
        threading.Thread(target=watch, name="preemption", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
