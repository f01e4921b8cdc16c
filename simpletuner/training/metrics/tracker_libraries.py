"""Libraries of trackers under one interface: wandb, trackio and swanlab, imported in the process that sends alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from simpletuner.training.images.clip_files import WEBP, as_gif


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
    """A run at a tracker. `log` takes values named `group/name`; images and videos are made by the library."""

    library: Any
    run: Any
    url: str
    """Address or command to look at it with."""

    def log(self, group: str, step: int, values: Mapping[str, Any]) -> None:
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

    def log(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        self.run.log({**values, f"{group}/step": step})


class TrackioRun(TrackerRun):
    """Trackio knows a run by its name, so that has the id in it. It writes below TRACKIO_DIR, or to a Space."""

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
        return self.library.Video(as_gif(path.with_suffix(WEBP))[0])


LIBRARIES: dict[str, Callable[[RunOptions], TrackerRun]] = {
    "wandb": WandbRun,
    "trackio": TrackioRun,
    "swanlab": SwanlabRun,
}
