"""Exports of checkpoints in processes of their own, one after the other, and what the page shows of them."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady, SimpleTunerError, explain_os_error
from simpletuner.page.editing.blocks import error_in
from simpletuner.page.runs.folder import RunFolder
from simpletuner.system.processes.python_process import module_command


@dataclass
class ExportJob:
    """An export of a checkpoint, or why the last one failed."""

    checkpoint: str
    command: Sequence[str]
    began: float
    """In seconds since 1970."""
    doing: str = "waiting for another one"
    error: SimpleTunerError | None = None
    is_running: bool = True


@dataclass
class Exporting:
    """The exports that this page was asked for, the last one of each run."""

    heavy: threading.Lock
    """Of the server: each process that imports torch takes gigabytes and all cores."""
    jobs: dict[Path, ExportJob] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    is_stopped: bool = False

    def begin(self, run: RunFolder, checkpoint: str, command: Sequence[str]) -> None:
        """Raises EnvironmentNotReady while another checkpoint of the run is exported."""
        job = self.jobs.get(run.path)
        if job is not None and job.is_running:
            raise EnvironmentNotReady(f"{job.checkpoint} of {run.name} is being exported", "wait until it is written")
        self.jobs[run.path] = job = ExportJob(checkpoint, command, time.time())
        threading.Thread(target=self.export, args=(job,), name="export", daemon=True).start()

    def export(self, job: ExportJob) -> None:
        with self.heavy:
            if not self.is_stopped:
                job.doing = "starting"
                try:
                    self.run(job)
                except OSError as error:  # no process can be started
                    job.error = explain_os_error(error)
        job.is_running = False

    def run(self, job: ExportJob) -> None:
        said: list[str] = []
        with subprocess.Popen(
            module_command("simpletuner", *job.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            self.process = process
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                job.doing = line.strip() or job.doing
        self.process = None
        if process.returncode:
            job.error = error_in("".join(said), "the process that exports ended without a result")

    def stop(self) -> None:
        """End the process with the page: a half-written export has no name."""
        self.is_stopped = True
        if (process := self.process) is not None:
            process.kill()
