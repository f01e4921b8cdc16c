"""Start a run as a process of its own, and stop the one that holds an output folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
from starlette.requests import Request

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.page.documents import Document, load_document
from simpletuner.page.rendering import folders_of
from simpletuner.page.runs.folder import CONSOLE, RunFolder
from simpletuner.system.locks import describe_holder, is_locked
from simpletuner.system.python_process import module_command

Started = dict[Path, subprocess.Popen[bytes]]
"""The processes that this page has started, by output folder; it keeps them to learn of their ends."""


def start_run(request: Request, name: str) -> RunFolder:
    """Run `simpletuner train --config NAME`, which goes on when the page ends.

    Raises SettingsError for mistakes in the file, EnvironmentNotReady where its output folder is in use.
    """
    folders, started = folders_of(request), started_by(request)
    document = Document.read(folders, name)
    settings = load_document(document, folders, os.environ).settings
    run = RunFolder(folders.resolve(settings.training.output_dir), folders)
    # Two clicks, in one tab or in two, start one run.
    with request.app.state.saving:
        if is_locked(run.lock, exclusively=True) or is_starting(request, run):
            raise EnvironmentNotReady(f"a run is using {run.name} already", "watch it, or stop it first")
        run.path.mkdir(parents=True, exist_ok=True)
        started[run.path] = launch(run, document.path, folders.roots[0])
    return run


def launch(run: RunFolder, config: Path, place: Path) -> subprocess.Popen[bytes]:
    command = module_command("simpletuner", "train", "--config", str(config))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(run.path / CONSOLE, flags, 0o666)
    try:
        # A session of its own: Ctrl-C in the page's terminal, and its end, are not for the run.
        return subprocess.Popen(
            command,
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def started_by(request: Request) -> Started:
    return request.app.state.started


def is_starting(request: Request, run: RunFolder) -> bool:
    """Whether a process that this page has started for a run is alive."""
    process = started_by(request).get(run.path)
    return process is not None and process.poll() is None


def stop_run(run: RunFolder) -> int:
    """Ask the run that holds an output folder to save and exit; return its pid.

    Raises SettingsError where no run holds it, EnvironmentNotReady for one that is not this machine's or not ours.
    """
    if is_locked(run.lock, exclusively=True) is not True:
        raise SettingsError(f"no run is using {run.name}", "it has ended already")
    holder = run.lock.read_text(encoding="utf-8", errors="replace")
    host, _, pid = holder.strip().rpartition(" ")
    if host != socket.gethostname():
        raise EnvironmentNotReady(f"{run.name} is run{describe_holder(holder)}", "stop it on that machine")
    if not pid.isdigit() or not holds(int(pid), run.lock):
        raise EnvironmentNotReady(
            f"the process that {run.name} names as its run does not hold its lock", "look at the processes by hand"
        )
    try:
        os.kill(int(pid), signal.SIGTERM)
    except (PermissionError, ProcessLookupError) as error:
        raise EnvironmentNotReady(f"process {pid} cannot be stopped: {error.strerror}", "is it yours?") from None
    return int(pid)


def holds(pid: int, lock: Path) -> bool:
    """Whether a process, or one that it has started, has a lock file open: a pid in a file may be another's by now."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return any(Path(file.path) == lock for each in family for file in each.open_files())
    except psutil.Error:
        return False
