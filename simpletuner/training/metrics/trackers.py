"""Trackers: TensorBoard, Weights & Biases, Trackio and SwanLab, with the same names of metrics.

None of them can stop a run: all but TensorBoard have a process of their own (`tracker_process.py`).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from simpletuner.errors import without_errno
from simpletuner.report import Report
from simpletuner.run_log import LOGGER
from simpletuner.runs.images import WEBP, clip_thumbnail, clips_of_round, read_rgb, round_folder
from simpletuner.runs.metrics import METRICS, last_row
from simpletuner.session import Session
from simpletuner.settings import settings_as_json
from simpletuner.settings.values.parsed import parse_trackers
from simpletuner.system.files.atomic import write_json
from simpletuner.system.processes.python_process import module_command
from simpletuner.training.hooks import RunHook
from simpletuner.training.metrics.metrics import Tracker
from simpletuner.training.metrics.tracker_process import read_tracker_state, state_file

# Before the process is started again after it failed; doubles each time.
RETRY_SECONDS = 60.0
CLOSE_SECONDS = 120.0
"""Longest time in which the rest is sent when the run ends."""


class OnlineTracker:
    """The process that sends metrics.jsonl and validation images; only starts, restarts and ends it."""

    def __init__(self, session: Session, library: str, folder: Path, step: int) -> None:
        self.report, logging, output = session.report, session.settings.logging, session.settings.training.output_dir
        self.library, path = library, state_file(output, library)
        state = read_tracker_state(path, self.report.warn)
        # Eight characters, as wandb's own. It is kept, so that a resumed run goes on in the same one there.
        state["id"] = state.get("id") or secrets.token_hex(4)
        # Steps that are trained again, since the run went back, are sent again.
        state["sent"] = {group: min(sent, step) for group, sent in state.get("sent", {}).items()}
        write_json(path, state)
        folder.mkdir(parents=True, exist_ok=True)
        self.output, self.folder = output, folder
        self.options = {
            "id": state["id"],
            "output": str(output),
            "folder": str(folder),
            "project": logging.tracker_project_name or os.environ.get(f"{library.upper()}_PROJECT") or "simpletuner",
            "name": logging.tracker_run_name or output.resolve().name,
            "settings": settings_as_json(session.loaded),
        }
        self.closing, self.has_warned, self.is_sent = threading.Event(), False, False
        self.process: subprocess.Popen[str] | None = None
        self.thread = threading.Thread(target=self._supervise, name=library, daemon=True)
        self.thread.start()

    def write(self, row: Mapping[str, object], group: str) -> None:
        """Do nothing: the process reads metrics.jsonl."""

    def add_image(self, path: Path, step: int) -> None:
        """Do nothing: the process finds the images."""

    def close(self) -> None:
        """Wait until all is sent, as long as that is possible."""
        self.report.status.begin(f"sending metrics to {self.library}")
        self.closing.set()
        self._end_input()
        self.thread.join(CLOSE_SECONDS)
        if self.thread.is_alive() and self.process is not None:
            self.process.kill()
            self.thread.join()
        if not self.is_sent:
            self.report.say(
                f"{self.library} has not received all of this run: the same command, run again, sends the rest"
            )

    def _end_input(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def _supervise(self) -> None:
        pause = RETRY_SECONDS
        while True:
            self._run_process()
            if self.closing.wait(0 if self.is_sent else pause):
                return
            # A server that is down for hours is not asked each minute.
            pause *= 2

    def _run_process(self) -> None:
        command = module_command("simpletuner.training.metrics.tracker_process")
        pipe = subprocess.PIPE
        # A separate session: Ctrl-C is for the run, which ends the process by its input.
        with subprocess.Popen(
            command, text=True, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            noise = threading.Thread(target=log_lines, args=(self.library, process.stderr), daemon=True)
            noise.start()
            with suppress(OSError):
                process.stdin.write(json.dumps({"library": self.library, "options": self.options}) + "\n")
                process.stdin.flush()
            self.process = process  # only now may `close` end its input
            if self.closing.is_set():
                self._end_input()
            for line in process.stdout:
                self._handle(json.loads(line))
            noise.join(1)  # with a limit: a library's process may have inherited the pipe
        if not self.is_sent and not self.closing.is_set():
            self._warn(f"{self.library} ended unexpectedly; log.txt has its reason")

    def _handle(self, message: Mapping[str, object]) -> None:
        match message:
            case {"url": str(url)}:
                self.report.say(f"{self.library}: {url}")
            case {"failed": str(why)}:
                self._warn(f"{self.library} does not take the metrics of this run: {why}")
            case {"sent": True}:
                self.is_sent = True
            case _:
                pass

    def _warn(self, text: str) -> None:
        """Warn once; later failures go to the log alone."""
        if not self.has_warned:
            self.has_warned = True
            self.report.warn(text, f"training goes on; what {self.library} misses is sent once it answers")
        else:
            LOGGER.info(text)


def log_lines(library: str, stream: IO[str] | None) -> None:
    with suppress(ValueError):  # it was closed meanwhile
        for line in stream or ():
            LOGGER.info(f"{library}: {line.rstrip().removeprefix(f'{library}: ')}")


class Trackers(RunHook):
    def trackers(self, step: int) -> Sequence[Tracker]:
        settings = self.session.settings
        names, folder = parse_trackers(settings.logging.report_to), self.folder
        opened: list[Tracker] = []
        if "tensorboard" in names:
            named = folder / settings.logging.tracker_run_name.replace("/", "-")
            opened.append(TensorBoard(named, step, settings_as_json(self.session.loaded), self.session.report))
        return [*opened, *(OnlineTracker(self.session, name, folder, step) for name in names if name != "tensorboard")]

    def skipped(self, step: int) -> None:
        """Send what an online tracker has missed."""
        output = self.session.settings.training.output_dir
        last = last_row(output / METRICS).get("step", -1)
        for name in parse_trackers(self.session.settings.logging.report_to):
            if name == "tensorboard":
                continue
            state = read_tracker_state(state_file(output, name), self.session.report.warn)
            if state.get("sent", {}).get("train", -1) < last:
                OnlineTracker(self.session, name, self.folder, step).close()

    @property
    def folder(self) -> Path:
        return self.session.settings.logging.logging_dir or self.session.settings.training.output_dir / "logs"


class TensorBoard:
    """Write event files with torch's own writer, which hides what an earlier start wrote after `step`."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, object], report: Report) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.report, self.is_failed = report, False
        # Hidden are the events of purge_step and later: those of the checkpoint's own step stay.
        self.writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
        rows = [f"| {name} | {json.dumps(value, ensure_ascii=False)} |" for name, value in settings.items()]
        self._try(
            lambda: self.writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), step)
        )

    def write(self, row: Mapping[str, object], group: str) -> None:
        for name, value in row.items():
            self._try(lambda name=name, value=value: self.writer.add_scalar(f"{group}/{name}", value, row["step"]))

    def add_image(self, path: Path, step: int) -> None:
        import numpy as np

        try:
            pixels = np.asarray(read_rgb(path))
        except OSError as error:  # damaged, or of more pixels than Pillow opens: 180 million
            self.report.warn(f"tensorboard does not show a validation grid: {without_errno(error)}")
            return
        self._try(lambda: self.writer.add_image("validation", pixels, step, dataformats="HWC"))
        for clip in clips_of_round(round_folder(path.parent, step), WEBP):
            self._add_clip(clip, step)

    def _add_clip(self, path: Path, step: int) -> None:
        """Write a clip as a GIF, which TensorBoard plays as an image."""
        from tensorboard.compat.proto import summary_pb2

        try:
            content, (width, height) = clip_thumbnail(path)
        except OSError as error:
            self.report.warn(f"tensorboard does not show a validation clip: {without_errno(error)}")
            return
        made: Any = summary_pb2
        image = made.Summary.Image(encoded_image_string=content, width=width, height=height, colorspace=3)
        summary = made.Summary(value=[made.Summary.Value(tag=f"validation/{path.stem}", image=image)])
        self._try(lambda: self.writer.file_writer.add_summary(summary, step))

    def close(self) -> None:
        self._try(self.writer.close)

    def _try(self, call: Callable[[], object]) -> None:
        """Call the writer; its thread's errors are raised by a later call."""
        if self.is_failed:
            return
        try:
            call()
        except (OSError, RuntimeError) as error:
            self.is_failed = True
            self.report.warn(
                f"tensorboard gets no more of this run: {without_errno(error)}",
                "metrics.jsonl in output_dir has it all",
            )
