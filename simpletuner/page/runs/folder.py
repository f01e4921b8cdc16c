"""The output folder of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.page.folders import Folders
from simpletuner.run_log import CONSOLE, LOG, START_CONSOLE
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.lease_folder import holder_of
from simpletuner.system.files.lease_record import Record
from simpletuner.system.files.locks import RUN_LOCK
from simpletuner.system.files.regular_files import read_end
from simpletuner.system.processes.run_status import STATUS
from simpletuner.training.metrics.metrics_reader import METRICS
from simpletuner.training.run_folder.settings_record import SETTINGS

FILES = (STATUS, METRICS, LOG, SETTINGS, CONSOLE)
RUN_FILES = (STATUS, METRICS, RUN_LOCK, CONSOLE, START_CONSOLE)
"""A folder with one of them is the output folder of a run; one of settings alone is not."""
MAX_RUNS = 200


@dataclass(frozen=True)
class RunFolder:
    """An output folder. What is a link to somewhere else, or no regular file, counts as missing."""

    path: Path
    folders: Folders

    @property
    def name(self) -> str:
        return self.folders.shown(self.path)

    @property
    def lock(self) -> Path:
        return self.path / RUN_LOCK

    @property
    def lease(self) -> tuple[Record, Holding]:
        """The holder of the folder, or the last one."""
        return holder_of(self.lock)

    def file(self, name: str) -> Path | None:
        path = self.path / name
        return path if path.is_file() and self.folders.holds(path) else None

    def holds_folder(self, name: str) -> bool:
        path = self.path / name
        return path.is_dir() and self.folders.holds(path)

    def tail(self, name: str, size: int) -> str:
        """Return the last `size` bytes of a file as text; empty where there is none."""
        path = self.file(name)
        return read_end(path, size).decode("utf-8", "replace") if path is not None else ""

    def written(self, *names: str) -> float:
        """Return when one of these files was last written, in seconds since the epoch; 0 where none is there."""
        return max((path.stat().st_mtime for name in names if (path := self.file(name))), default=0.0)


def open_run(folders: Folders, name: str) -> RunFolder:
    """Raises SettingsError for a folder outside the page's folders, or one in which nothing has run."""
    run = RunFolder(folders.resolve(name), folders)
    if not is_run(run.path):
        raise SettingsError(f"there is no run in {folders.shown(run.path)}", "the list of runs shows those there are")
    return run


def is_of_run(folders: Folders, path: Path) -> bool:
    """Return whether a file is in the folder of a run, other than the page's own folders."""
    below = (folder for folder in path.parents if any(root in folder.parents for root in folders.roots))
    return any(is_run(folder) for folder in below)


def check_run(path: Path) -> None:
    """Raise SettingsError for a folder in which nothing has run, or that is not there."""
    if not is_run(path):
        raise SettingsError(f"there is no run in {path}", "name the output folder of a run, its output_dir")


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)
