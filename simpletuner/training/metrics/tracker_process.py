"""The process that sends metrics and validation images to wandb, trackio or swanlab.

Not in the process that trains: wandb 0.27 waits without end for a server that does not answer, whatever
`init_timeout` says, and neither its threads nor its exit handlers may delay a run. It reads the run's own
files, so a time without connection only means reading on from there later. It ends when its input
does: when the run closes it, or dies.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from simpletuner.run_log import LOGGER
from simpletuner.runs.images import MP4, WEBP, clip_thumbnail, clips_of_round, round_folder
from simpletuner.runs.metrics import METRICS, MetricsReader
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.regular_files import Warn, read_state


@dataclass(frozen=True)
class RunOptions:
    """Options of the run at a tracker, as `OnlineTracker` sends them to its process."""

    id: str
    output: str
    folder: str
    project: str
    name: str
    settings: Mapping[str, Any]


class TrackerRun:
    """A run at a tracker. `log` takes values named `group/name`; the library makes images and videos."""

    library: Any
    run: Any
    url: str
    """Address or command to look at it with."""

    def log(self, group: str, step: int, values: Mapping[str, object]) -> None:
        self.run.log(dict(values), step=step)

    def image(self, path: Path) -> Any:
        return self.library.Image(str(path))

    def video(self, path: Path) -> Any:
        return self.library.Video(str(path), format="mp4")

    def finish(self) -> None:
        self.run.finish()


class OpeningFailed(Exception):
    """The library says why it does not take the run."""


class WandbRun(TrackerRun):
    """Groups have axes of their own, since wandb's step counts calls of log(), of all groups together."""

    def __init__(self, options: RunOptions) -> None:
        import wandb

        self.library = wandb
        try:
            self.run = wandb.init(
                project=options.project,
                name=options.name,
                id=options.id,
                resume=None if os.environ.get("WANDB_MODE") in ("offline", "dryrun") else "allow",
                dir=options.folder,
                config=dict(options.settings),
                # By default wandb records the git remote and the program of the user's current folder.
                settings=wandb.Settings(console="off", disable_code=True, disable_git=True),
            )
        except wandb.Error as error:
            raise OpeningFailed(str(error).partition("\n")[0] or type(error).__name__) from error
        self.url = self.run.url or f"offline; `wandb sync {Path(self.run.dir).parent}` sends it"
        for group in ("train", "eval"):
            self.run.define_metric(f"{group}/*", step_metric=f"{group}/step")
        self.run.define_metric("validation", step_metric="validation/step")

    def log(self, group: str, step: int, values: Mapping[str, object]) -> None:
        self.run.log({**values, f"{group}/step": step})


class TrackioRun(TrackerRun):
    """Trackio knows a run by its name, which has the id. It writes below TRACKIO_DIR, or to a Space."""

    def __init__(self, options: RunOptions) -> None:
        self.library = import_module("trackio")
        self.run = self.library.init(
            project=options.project,
            name=f"{options.name}-{options.id}",
            config=dict(options.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # of this process, which computes nothing
            auto_log_cpu=False,
        )
        self.url = getattr(self.run, "url", None) or f"`trackio show --project {options.project}` shows it"


class SwanlabRun(TrackerRun):
    """SwanLab counts steps by metric, and shows clips as GIF alone."""

    def __init__(self, options: RunOptions) -> None:
        self.library = import_module("swanlab")
        try:
            self.run = self.library.init(
                project=options.project,
                name=options.name,
                id=options.id,
                resume="allow",
                log_dir=options.folder,
                config=dict(options.settings),
            )
        except RuntimeError as error:  # without a key, and no terminal to ask for one
            raise OpeningFailed(str(error).partition("\n")[0]) from error
        # `url` raises in other modes.
        self.url = self.run.url if self.run.mode == "online" else f"offline; `swanlab sync {self.run.dir}` sends it"

    def video(self, path: Path) -> Any:
        return self.library.Video(clip_thumbnail(path.with_suffix(WEBP))[0])


LIBRARIES: dict[str, Callable[[RunOptions], TrackerRun]] = {
    "wandb": WandbRun,
    "trackio": TrackioRun,
    "swanlab": SwanlabRun,
}


POLL_SECONDS = 1.0
# Longest time to connect before a report, and before a run that ends gives up; WANDB_INIT_TIMEOUT, which is
# the library's own, takes precedence.
CONNECT_SECONDS = 30.0
FINISH_SECONDS = 110.0
"""Longest time in which the rest is sent once the run has ended."""
GRID = re.compile(r"grid-(\d+)\.png")


class Channel:
    """Reports to the run, one JSON object per line."""

    def __init__(self) -> None:
        self.file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what the library prints goes to the log

    def send(self, **message: object) -> None:
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
            numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
            values = {f"{group}/{name}": value for name, value in numbers.items()}
            self._log(group, row["step"], values)
        for step, path in self._grids():
            clips = clips_of_round(round_folder(path.parent, step), MP4)
            videos = {f"validation/{clip.stem}": self.run.video(clip) for clip in clips}
            self._log("validation", step, {"validation": self.run.image(path), **videos})
        if self.sent != before:
            write_json(self.path, self.state)

    def _log(self, group: str, step: int, values: Mapping[str, object]) -> None:
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


def parse_tracker_state(content: bytes) -> dict[str, object]:
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
