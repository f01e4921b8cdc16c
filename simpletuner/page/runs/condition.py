"""Whether a run is running, and if not, how it ended.

Only what cannot lie counts: the lock of the output folder, which the kernel releases when its process ends, and what
the run itself wrote last. A run that said nothing of its end and holds no lock was killed, or its machine was.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from enum import StrEnum

import psutil

from simpletuner.page.runs.folder import CONSOLE, RunFolder
from simpletuner.page.runs.log import Log, parse_log
from simpletuner.run_log import LOG
from simpletuner.status_line import LINE_SECONDS, format_seconds
from simpletuner.system.locks import describe_holder, is_locked
from simpletuner.training.metrics_reader import METRICS

SILENT_SECONDS = 2.5 * LINE_SECONDS
"""A run writes a status line to its log each minute, whatever it is doing; one that misses two is stuck."""
CONSOLE_BYTES = 64 << 10


class State(StrEnum):
    """What a run is doing, or how it ended."""

    STARTING = "starting"
    RUNNING = "running"
    STUCK = "stuck"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    KILLED = "killed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Condition:
    """A state, the sentence that explains it, and what to do about it."""

    state: State
    sentence: str = ""
    hint: str = ""

    @property
    def is_live(self) -> bool:
        return self.state in (State.STARTING, State.RUNNING, State.STUCK)


def find_condition(run: RunFolder, log: Log, starting: bool) -> Condition:
    """Return the condition of a run; `starting`: whether a process that this page has started for it is alive."""
    # A file system without locks leaves the times of files.
    locked = is_locked(run.lock, exclusively=True)
    silent = time.time() - run.written(LOG, METRICS)
    if locked:
        return condition_of_holder(run, log, silent)
    if starting:
        return Condition(State.STARTING, "the process has started and has not reached its output folder yet")
    if locked is None and not log.ending()[0]:
        return condition_without_locks(log, silent)
    return find_ending(run, log)


def condition_of_holder(run: RunFolder, log: Log, silent: float) -> Condition:
    holder = run.lock.read_text(encoding="utf-8", errors="replace")
    if paused := paused_process(holder):
        return Condition(State.STUCK, f"process {paused} is paused (SIGSTOP)", f"`kill -CONT {paused}` lets it go on")
    if silent > SILENT_SECONDS:
        sentence = f"it is alive{describe_holder(holder)}, but has written nothing for {format_seconds(silent)}"
        return Condition(State.STUCK, sentence, "look at the processes on that machine; stopping it saves if it can")
    entries = log.last_start
    return Condition(State.RUNNING, entries[-1].text.partition("\n")[0] if entries else "")


def paused_process(holder: str) -> int | None:
    """Return the pid of a paused process of a run on this machine."""
    host, _, pid = holder.strip().rpartition(" ")
    if host != socket.gethostname() or not pid.isdigit():
        return None
    try:
        launcher = psutil.Process(int(pid))
        family = [launcher, *launcher.children(recursive=True)]
        return next((each.pid for each in family if each.status() == psutil.STATUS_STOPPED), None)
    except psutil.Error:
        return None


def condition_without_locks(log: Log, silent: float) -> Condition:
    if silent < SILENT_SECONDS:
        return Condition(State.RUNNING, "it wrote to its log lately; this file system has no locks to tell for sure")
    sentence = f"it has written nothing for {format_seconds(silent)}, and this file system has no locks to tell more"
    return Condition(State.UNKNOWN, sentence, "look at the machine on which it was started")


def find_ending(run: RunFolder, log: Log) -> Condition:
    """Return how a run ended that nobody runs any more."""
    if refused := find_refusal(run):
        return refused
    ending, entry = log.ending()
    if entry is not None:
        sentence = "" if ending == "finished" else entry.message
        return Condition(State(ending), sentence, entry.hint or resume_hint(ending))
    if not log.entries:
        sentence = "it ended before it wrote to its log" if run.file(CONSOLE) else "it has no log"
        return Condition(State.KILLED if run.file(CONSOLE) else State.UNKNOWN, sentence)
    last = log.entries[-1]
    sentence = f"it ended without a word after {last.time}: killed, out of memory, or the machine went down"
    return Condition(State.KILLED, sentence, "the same command goes on from its last checkpoint")


def resume_hint(ending: str) -> str:
    return "start it again to go on from its last checkpoint" if ending == "stopped" else ""


def find_refusal(run: RunFolder) -> Condition | None:
    """Return why a start from the page ended before it had a log, such as a mistake in the settings."""
    if run.written(CONSOLE) < run.written(LOG):
        return None
    lines = run.tail(CONSOLE, CONSOLE_BYTES).splitlines()
    said = parse_log("\n".join(line if line.startswith(" ") else f"0000-00-00 00:00:00 {line}" for line in lines))
    error = next((entry for entry in said if entry.kind == "error"), None)
    return Condition(State.FAILED, error.message, error.hint) if error else None
