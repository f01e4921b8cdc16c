"""Start a run as a separate process, and stop the process that holds an output folder."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.page.child_processes import launch
from simpletuner.page.editing.documents import Document, load_document
from simpletuner.runs.checkpoints import named_checkpoint
from simpletuner.runs.condition import Condition, KnownStart, find_condition
from simpletuner.runs.folder import Folders, RunFolder
from simpletuner.runs.listing import read_status_of
from simpletuner.settings import Loaded
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.lease_folder import StandingRecords
from simpletuner.system.files.lease_record import Record
from simpletuner.system.processes.run_status import RunState
from simpletuner.system.processes.signals import REPEAT_SECONDS

if TYPE_CHECKING:  # `simpletuner status` has no server
    from starlette.requests import Request

# Longest wait, before leaving, for a run to handle the first signal; one that hangs never does.
HANDLED_SECONDS = 10.0


@dataclass
class Processes:
    """Actions of this page on runs, by output folder."""

    started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Kept to learn of their ends."""
    asked: dict[Path, str] = field(default_factory=dict)
    """Ids of the leases whose holders were asked to stop. A run says so itself, but a second click can be faster."""
    configs: dict[Path, str] = field(default_factory=dict)
    standing: StandingRecords = field(default_factory=StandingRecords)

    def is_started(self, output: Path) -> bool:
        """True while a process that this page started for a folder runs."""
        return bool(self.started) and (process := self.started.get(output)) is not None and process.poll() is None

    def known(self, run: RunFolder) -> KnownStart:
        pid = self.started[run.path].pid if self.is_started(run.path) else 0
        return KnownStart(pid, self.asked.get(run.path, ""), self.configs.get(run.path, ""), self.standing)


def processes_of(request: Request) -> Processes:
    return request.app.state.processes


@dataclass(frozen=True)
class PreparedStart:
    """A configuration that may be started, as it was when it was read."""

    document: Document
    loaded: Loaded
    run: RunFolder


def prepare_start(folders: Folders, name: str, complete: bool = False) -> PreparedStart:
    """Raises SettingsError for mistakes in the file; with `complete` also for a setting that it lacks."""
    document = Document.read(folders, name)
    loaded = load_document(document, folders, os.environ, complete)
    return PreparedStart(document, loaded, RunFolder(folders.resolve(loaded.settings.training.output_dir), folders))


def is_in_use(processes: Processes, run: RunFolder) -> bool:
    return run.lease[1] is Holding.HELD or bool(processes.known(run).started_pid)


def start_prepared(
    processes: Processes, prepared: PreparedStart, checkpoint: str = "", variables: Mapping[str, str] = {}
) -> subprocess.Popen[bytes]:
    """Run `simpletuner train --config NAME`, which goes on when the page ends; from a checkpoint of its
    folder by name, else from the newest. The caller holds the lock of what is saved: two clicks, in one tab
    or in two, start one run.

    Raises EnvironmentNotReady where its output folder is in use.
    """
    run = prepared.run
    if is_in_use(processes, run):
        raise EnvironmentNotReady(f"a run is using {run.name} already", "watch it, or stop it first")
    resumed = run.path / "checkpoints" / named_checkpoint(run, checkpoint).row.name if checkpoint else None
    run.path.mkdir(parents=True, exist_ok=True)
    resume = [f"--resume_from_checkpoint={resumed}"] if resumed else []
    arguments = ["train", "--config", str(prepared.document.path), *resume]
    processes.configs[run.path] = str(prepared.document.path)
    processes.started[run.path] = process = launch(run, arguments, run.folders.roots[0], variables)
    return process


def stop_run(request: Request, run: RunFolder) -> int:
    """Ask the run that holds an output folder to save and exit; return its pid.

    Raises SettingsError where no run holds it, EnvironmentNotReady for one that is not this machine's or not
    ours, or that is stopping: the same signal again would end it without saving.
    """
    processes = processes_of(request)
    with request.app.state.saving:
        if look_at(processes, run).can_leave:
            hint = "it finishes its step and saves a checkpoint; *Leave without saving* would lose that"
            raise EnvironmentNotReady(f"{run.name} is stopping already", hint)
        holder = signal_holder(run)
        processes.asked[run.path] = holder.id
    return holder.pid


def leave_run(request: Request, run: RunFolder) -> int:
    """Have a run that is stopping exit at once, without saving; return its pid.

    Raises SettingsError where no run is stopping, EnvironmentNotReady as `stop_run` does.
    """
    if not look_at(processes_of(request), run).can_leave:
        raise SettingsError(f"{run.name} is not stopping", "stop it first: it saves a checkpoint")
    # A signal that follows sooner counts as the same request, from when the run has handled the first one: a
    # run on a busy machine does so late, and then this one would be lost.
    end = time.monotonic() + HANDLED_SECONDS
    while not has_handled_stop(run) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(REPEAT_SECONDS + 0.2)
    with request.app.state.saving:
        return signal_holder(run).pid


def has_handled_stop(run: RunFolder) -> bool:
    status = read_status_of(run)
    return status is not None and status.state not in (RunState.STARTING, RunState.RUNNING)


def look_at(processes: Processes, run: RunFolder) -> Condition:
    return find_condition(run, read_status_of(run), processes.known(run))


def signal_holder(run: RunFolder) -> Record:
    """Send SIGTERM to the run that holds an output folder; return its record. Raises as `stop_run` does."""
    holder, holding = run.lease
    if holding is Holding.FREE:
        raise SettingsError(f"no run is using {run.name}", "it has ended already")
    if not holder.is_here:
        raise EnvironmentNotReady(f"{run.name} is run{holder.describe()}", "stop it on that machine")
    if not holds(holder, run.lock):
        raise EnvironmentNotReady(
            f"the process that {run.name} names as its run does not hold its lock", "look at the processes by hand"
        )
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except (PermissionError, ProcessLookupError) as error:
        raise EnvironmentNotReady(f"process {holder.pid} cannot be stopped: {error.strerror}", "is it yours?") from None
    return holder


def holds(holder: Record, lock: Path) -> bool:
    """Check that the process to signal is the one of the record: its pid may be another's by now.

    Of an earlier version, whether it, or one that it has started, has the lock file open.
    """
    try:
        if holder.process:
            launchers = (holder.process, psutil.Process(holder.process).ppid())
            return holder.is_of_living_process and holder.pid in launchers
        process = psutil.Process(holder.pid)
        family = [process, *process.children(recursive=True)]
        return any(Path(file.path) == lock for each in family for file in each.open_files())
    except psutil.Error:
        return False
