"""The output folder of a run, and how to find such folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.page.configurations import MAX_DEPTH, SKIPPED
from simpletuner.page.folders import Folders
from simpletuner.run_log import LOG
from simpletuner.system.locks import RUN_LOCK
from simpletuner.system.regular_files import read_end
from simpletuner.training.metrics_reader import METRICS
from simpletuner.training.settings_record import SETTINGS

CONSOLE = "console.txt"
"""What a run that the page has started prints; a mistake in its settings is nowhere else."""
FILES = (METRICS, LOG, SETTINGS, CONSOLE)
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

    def file(self, name: str) -> Path | None:
        path = self.path / name
        return path if path.is_file() and self.folders.holds(path) else None

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


def is_run(path: Path) -> bool:
    """Whether a folder is the output folder of a run: a folder of settings alone has no metrics, log or lock."""
    return any((path / name).is_file() for name in (METRICS, RUN_LOCK, CONSOLE))


def find_runs(folders: Folders) -> list[RunFolder]:
    """Return the runs in the folders and a few levels below, those that were written last first."""
    found = {path: RunFolder(path, folders) for root in folders.roots for path in walk(root)}
    runs = sorted(found.values(), key=lambda run: -run.written(*FILES))
    return runs[:MAX_RUNS]


def walk(root: Path) -> Iterator[Path]:
    for place, below, names in os.walk(root):
        if {METRICS, RUN_LOCK, CONSOLE}.intersection(names):
            below.clear()  # checkpoints, caches and images: nothing to look for, and many files
            yield Path(place)
            continue
        depth = len(Path(place).relative_to(root).parts)
        kept = [name for name in below if not name.startswith(".") and name not in SKIPPED]
        below[:] = kept if depth < MAX_DEPTH else []
