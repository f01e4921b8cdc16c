"""The process that sends a run's metrics and validation images to an online tracker.

Not in the process that trains: wandb 0.27 waits without end for a server that does not answer, whatever `init_timeout`
says, and neither its threads nor its exit handlers may delay a run. It reads what the run writes anyway, so what was
missed while it could not send is just what it reads next. It ends when its input does: when the run closes it, or dies.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from simpletuner.run_log import LOGGER
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.unread import Warn, read_state
from simpletuner.training.images.clip_files import MP4, clips_of_round, round_folder
from simpletuner.training.metrics.metrics_reader import METRICS, MetricsReader
from simpletuner.training.metrics.tracker_libraries import LIBRARIES, OpeningFailed, RunOptions, TrackerRun

POLL_SECONDS = 1.0
CONNECT_SECONDS = 30.0
"""Longest time to connect before a report, and before a run that ends gives up; WANDB_INIT_TIMEOUT, which is the
library's own, takes precedence."""
FINISH_SECONDS = 110.0
"""Longest time in which the rest is sent once the run has ended."""
GRID = re.compile(r"grid-(\d+)\.png")


class Channel:
    """Reports to the run, one JSON object per line."""

    def __init__(self) -> None:
        self.file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what the library prints goes to the log

    def send(self, **message: Any) -> None:
        self.file.write(json.dumps(message) + "\n")


class Deadline:
    """Ends this process when connecting or finishing takes too long after the run has ended."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.connected, self.closing = threading.Event(), threading.Event()
        self.connect_seconds = float(os.environ.get("WANDB_INIT_TIMEOUT") or CONNECT_SECONDS)
        threading.Thread(target=self._watch_input, daemon=True).start()
        threading.Thread(target=self._watch_connecting, daemon=True).start()

    def _watch_input(self) -> None:
        sys.stdin.read()
        self.closing.set()

    def _watch_connecting(self) -> None:
        # One thread reports and ends, since of two the one that ends could come before the report.
        if not self.connected.wait(self.connect_seconds):
            self.channel.send(failed=f"no answer from the server for {self.connect_seconds:.0f} s")
        self.closing.wait()
        if self.connected.is_set():
            time.sleep(FINISH_SECONDS)
        os._exit(1)


class Follower:
    """Logs new rows of metrics.jsonl and new grids of images, and keeps in a file how far it has come."""

    def __init__(self, output: Path, run: TrackerRun, state: Path) -> None:
        self.output, self.run, self.path, self.last_step = output, run, state, 0
        self.reader = MetricsReader(output / METRICS)
        self.state = read_tracker_state(state, LOGGER.warning)
        self.sent: dict[str, int] = self.state.setdefault("sent", {})

    def poll(self) -> None:
        """Log what is new."""
        before = dict(self.sent)
        for row in self.reader.read()[0]:
            self.last_step = max(self.last_step, row["step"])
            group = "train" if "loss" in row else "eval"
            values = {f"{group}/{name}": value for name, value in row.items() if name != "step"}
            self._log(group, row["step"], values)
        for step, path in self._grids():
            clips = clips_of_round(round_folder(path.parent, step), MP4)
            videos = {f"validation/{clip.stem}": self.run.video(clip) for clip in clips}
            self._log("validation", step, {"validation": self.run.image(path), **videos})
        if self.sent != before:
            write_json(self.path, self.state)

    def _log(self, group: str, step: int, values: dict[str, Any]) -> None:
        # A run that went back to a checkpoint repeats steps, which trackers take once only.
        if step > self.sent.get(group, -1):
            self.run.log(group, step, values)
            self.sent[group] = step

    def _grids(self) -> list[tuple[int, Path]]:
        found = [(GRID.fullmatch(path.name), path) for path in (self.output / "validation").glob("grid-*.png")]
        grids = sorted((int(name[1]), path) for name, path in found if name)
        # Later grids are from before the run went back to an earlier checkpoint.
        return [(step, path) for step, path in grids if self.sent.get("validation", -1) < step <= self.last_step]


def state_file(output: Path, library: str) -> Path:
    """Return the file of a run's id, and of the last step of each group that was handed to a library."""
    return output / f"{library}.json"


def read_tracker_state(path: Path, warn: Warn) -> dict[str, Any]:
    return read_state(path, parse_tracker_state, warn) or {}


def parse_tracker_state(content: bytes) -> dict[str, Any]:
    """Raises ValueError, AttributeError or RecursionError for another content."""
    state = json.loads(content)
    if not all(isinstance(step, int) for step in state.setdefault("sent", {}).values()):
        raise ValueError("a step is no number")
    return state


def main() -> None:
    """Follow a run until it ends. The first line of the input holds the library and its options, as JSON."""
    channel, sent = Channel(), json.loads(sys.stdin.readline())
    deadline = Deadline(channel)
    library, options = sent["library"], RunOptions(**sent["options"])
    try:
        run = LIBRARIES[library](options)
    except OpeningFailed as error:
        channel.send(failed=str(error))
        raise SystemExit(1) from None
    deadline.connected.set()
    channel.send(url=run.url)
    output = Path(options.output)
    follower = Follower(output, run, state_file(output, library))
    while not deadline.closing.wait(POLL_SECONDS):
        follower.poll()
    follower.poll()
    run.finish()
    channel.send(sent=True)


if __name__ == "__main__":
    main()
