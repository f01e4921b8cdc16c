"""Trackers: TensorBoard, Weights & Biases, Trackio and SwanLab, with the same names of metrics.

None of them can stop a run: all but TensorBoard have a process of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import without_errno
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import settings_as_json
from simpletuner.settings.values.trackers import parse_trackers
from simpletuner.training.images.clip_files import WEBP, as_gif, clips_of_round, round_folder
from simpletuner.training.images.image_files import read_rgb
from simpletuner.training.metrics.metrics import Tracker
from simpletuner.training.metrics.metrics_reader import METRICS, last_row
from simpletuner.training.metrics.online_tracker import OnlineTracker
from simpletuner.training.metrics.tracker_process import read_tracker_state, state_file


def open_trackers(session: Session, step: int) -> list[Tracker]:
    """Open what `report_to` names, for a run that goes on after `step`."""
    settings = session.settings
    names, output = parse_trackers(settings.logging.report_to), settings.training.output_dir
    folder = settings.logging.logging_dir or output / "logs"
    opened: list[Tracker] = []
    if "tensorboard" in names:
        named = folder / settings.logging.tracker_run_name.replace("/", "-")
        opened.append(TensorBoard(named, step, settings_as_json(session.loaded), session.report))
    return [*opened, *(OnlineTracker(session, name, folder, step) for name in names if name != "tensorboard")]


def send_missed(session: Session, step: int) -> None:
    """Send what an online tracker has missed of a run that has finished, at `step`."""
    settings = session.settings
    output = settings.training.output_dir
    if not session.world.is_first:
        return
    last = last_row(output / METRICS).get("step", -1)
    for name in parse_trackers(settings.logging.report_to):
        if name == "tensorboard":
            continue
        state = read_tracker_state(state_file(output, name), session.report.warn)
        if state.get("sent", {}).get("train", -1) < last:
            OnlineTracker(session, name, settings.logging.logging_dir or output / "logs", step).close()


class TensorBoard:
    """Write event files with torch's own writer, which hides what an earlier start wrote after `step`."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any], report: Report) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.report, self.is_failed = report, False
        # Hidden are the events of purge_step and later: those of the checkpoint's own step stay.
        self.writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
        rows = [f"| {name} | {json.dumps(value, ensure_ascii=False)} |" for name, value in settings.items()]
        self._try(
            lambda: self.writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), step)
        )

    def write(self, row: Mapping[str, Any], group: str) -> None:
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
            content, (width, height) = as_gif(path)
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
