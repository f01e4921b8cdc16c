"""The state of a run, and how it ended.

Only what cannot lie counts: the lease of the output folder, and the status that the run itself wrote. One
that wrote no end and holds no lease was killed, or its machine was. Of a run on another machine that may take
watching for a while.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import psutil

from simpletuner.run_log import CONSOLE, LOG, START_CONSOLE
from simpletuner.runs.folder import RunFolder, parse_log
from simpletuner.runs.metrics import METRICS
from simpletuner.status_line import LINE_SECONDS, format_seconds
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.lease_folder import StandingRecords
from simpletuner.system.files.lease_record import Record
from simpletuner.system.processes.run_status import ENDS, STATUS, RunState, RunStatus

# A run writes a status line to its log each minute, whatever it is doing; one that misses two is stuck.
SILENT_SECONDS = 2.5 * LINE_SECONDS
CONSOLE_BYTES = 64 << 10
RESUME_HINT = "start it again to go on from its last checkpoint"


@dataclass(frozen=True)
class Condition:
    """A state, the sentence that explains it, and what to do about it."""

    state: RunState
    sentence: str = ""
    hint: str = ""
    can_stop: bool = False
    """True if a process holds the folder that has not been asked to stop."""
    can_leave: bool = False
    """True if a process holds the folder that has been asked: asked again, it exits without saving."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDS


@dataclass(frozen=True)
class KnownStart:
    """Facts about a run that only the page has: the pid that it has started (0 once that has ended), and its
    stop request."""

    started_pid: int = 0
    asked: str = ""
    """Id of the lease whose holder the page has asked to stop."""
    config: str = ""
    """The configuration that the page has started it with: a refused start leaves no status."""
    standing: StandingRecords = field(default_factory=StandingRecords)


def find_condition(run: RunFolder, status: RunStatus | None, known: KnownStart) -> Condition:
    holder, holding = run.lease
    if holding is Holding.HELD and not holder.damaged:
        return condition_of_holder(run, holder, status, known)
    # A run takes the lock only when it reaches its output folder, some seconds after its process has started.
    if known.started_pid and (status is None or status.pid != known.started_pid):
        return Condition(RunState.STARTING, "the process has started and has not reached its output folder yet")
    if status is None:
        return find_refusal(run) or condition_without_status(run)
    if status.has_ended:
        return describe_end(status)
    if holding is not Holding.FREE and not known.standing.is_dead(run.lock, holder):
        return condition_elsewhere(run, holder, status)
    if is_alive(status):
        return Condition(RunState.STOPPING, "its processes are exiting")
    was_asked = status.state is RunState.STOPPING  # or by a signal to srun or mpirun, which leave no time
    why = (
        "asked to stop, and killed before it had saved"
        if was_asked
        else "killed, out of memory, or the machine went down"
    )
    sentence = f"the process disappeared after {status.time}: {why}"
    return Condition(RunState.KILLED, sentence, RESUME_HINT)


def condition_of_holder(run: RunFolder, holder: Record, status: RunStatus | None, known: KnownStart) -> Condition:
    is_asked = bool(known.asked) and known.asked == holder.id
    if status is None or (holder.host, holder.pid) != (status.host, status.pid):
        state = RunState.STOPPING if is_asked else RunState.RUNNING
        return Condition(state, "it has not said yet what it is doing", can_stop=not is_asked, can_leave=is_asked)
    if status.has_ended:
        return describe_end(status)
    is_asked |= status.state is RunState.STOPPING
    condition = partial(Condition, can_stop=not is_asked, can_leave=is_asked)
    if paused := paused_process(status):
        hint = f"`kill -CONT {paused}` lets it go on"
        return condition(RunState.STUCK, f"process {paused} is paused (SIGSTOP)", hint)
    silent = time.time() - run.written(STATUS, LOG, METRICS)
    if silent > SILENT_SECONDS:
        sentence = f"it is alive{holder.describe()}, but has written nothing for {format_seconds(silent)}"
        return condition(RunState.STUCK, sentence, "look at the processes on that machine")
    asked = "asked to stop" if is_asked else ""
    is_in_step = bool(status.max_steps) and status.total == status.max_steps  # which the reason is about
    sentence = "; ".join(filter(None, (status.reason or asked, "" if is_asked and is_in_step else doing(status))))
    return condition(RunState.STOPPING if is_asked else status.state, sentence)


def doing(status: RunStatus) -> str:
    """Return the phase of a run, with how much of it is done unless the steps say so."""
    is_counted = status.total > 0 and (status.done, status.total) != (status.step, status.max_steps)
    return f"{status.doing}: {status.done:,}/{status.total:,}" if is_counted else status.doing


def describe_end(status: RunStatus) -> Condition:
    hint = RESUME_HINT if status.state is RunState.STOPPED else status.hint
    return Condition(status.state, status.reason, hint)


def is_alive(status: RunStatus) -> bool:
    """True if the process of a status runs on this machine; its pid may meanwhile belong to another one."""
    try:
        is_same = psutil.Process(status.pid).create_time() <= datetime.fromisoformat(status.started).timestamp()
        return status.host == socket.gethostname() and is_same
    except (psutil.Error, ValueError):
        return False


def paused_process(status: RunStatus) -> int | None:
    if status.host != socket.gethostname():
        return None
    try:
        launcher = psutil.Process(status.pid)
        family = [launcher, *launcher.children(recursive=True)]
        return next((each.pid for each in family if each.status() == psutil.STATUS_STOPPED), None)
    except (psutil.Error, ValueError):
        return None


def condition_elsewhere(run: RunFolder, holder: Record, status: RunStatus) -> Condition:
    """Condition of a run that this machine cannot see, by the times of its files: to be shown, no more."""
    silent = time.time() - run.written(STATUS, LOG, METRICS)
    where = f"only the machine on which it was started{holder.describe()} knows more"
    if silent < SILENT_SECONDS:
        return Condition(status.state, f"{doing(status)}, says its status; {where}")
    sentence = f"it has written nothing for {format_seconds(silent)}, and {where}"
    return Condition(RunState.UNKNOWN, sentence, "look at that machine; a start waits until its death is certain")


def condition_without_status(run: RunFolder) -> Condition:
    if run.file(CONSOLE) or run.file(START_CONSOLE):
        return Condition(RunState.KILLED, "it ended before it reached its output folder")
    return Condition(RunState.UNKNOWN, f"it has no readable {STATUS}")


def find_refusal(run: RunFolder) -> Condition | None:
    """Return the error of the last start from a page if it ended before it held the folder, such as a mistake
    in the settings.

    The status is that of an earlier start then, which it was to leave as it is.
    """
    if run.written(START_CONSOLE) <= run.written(STATUS):
        return None
    lines = run.tail(START_CONSOLE, CONSOLE_BYTES).splitlines()
    said = parse_log("\n".join(line if line.startswith(" ") else f"0000-00-00 00:00:00 {line}" for line in lines))
    error = next((entry for entry in said if entry.kind == "error"), None)
    return Condition(RunState.FAILED, error.message, error.hint) if error else None
