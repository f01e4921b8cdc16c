"""The output folder of a run, within the folders of a page or command, and `log.txt` as entries."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simpletuner.errors import SettingsError
from simpletuner.run_log import CONSOLE, LOG, START_CONSOLE, STARTED
from simpletuner.runs.metrics import METRICS
from simpletuner.runs.settings_record import SETTINGS
from simpletuner.settings.declared.errors import shorten
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.lease_folder import holder_of
from simpletuner.system.files.lease_record import Record
from simpletuner.system.files.locks import RUN_LOCK
from simpletuner.system.files.paths import expand_path
from simpletuner.system.files.regular_files import read_end
from simpletuner.system.processes.run_status import STATUS

HINT = "start the page with --folder to open others"
# Levels of folders that a search for configurations or runs goes down: it may begin in a home folder.
MAX_DEPTH = 4
# Names of folders that such a search does not enter.
SKIPPED = {"node_modules", "site-packages", "checkpoints", "cache", "__pycache__", "venv"}


@dataclass(frozen=True)
class Folders:
    """Absolute folders without symbolic links.

    Names in requests begin in the current folder, as the paths in settings do.
    """

    roots: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Folders:
        """Raises SettingsError for a folder that does not exist."""
        for path in paths:
            if not path.is_dir():
                raise SettingsError(f"there is no folder {path}", "name a folder that exists")
        return cls(tuple(dict.fromkeys(path.resolve() for path in paths)))

    def resolve(self, name: str | Path) -> Path:
        """Real path behind a name, which need not exist. Raises SettingsError outside the folders."""
        try:
            # Symbolic links are followed first: one that leads outside is outside.
            path = Path(os.path.realpath(name if os.path.lexists(name) else expand_path(name)))
        except (OSError, ValueError):  # NUL characters, bytes that are not UTF-8, an unknown user's home
            path = None
        if path is None or not any(path.is_relative_to(root) for root in self.roots):
            raise SettingsError(f"{shorten(str(name))} is not in {', '.join(map(str, self.roots))}", HINT)
        return path

    def holds(self, name: str | Path) -> bool:
        try:
            self.resolve(name)
        except SettingsError:
            return False
        return True

    def shown(self, path: Path) -> str:
        """Format a path for people, and for addresses: below the current folder without that."""
        current = Path.cwd()
        return str(path.relative_to(current)) if path.is_relative_to(current) else str(path)


FILES = (STATUS, METRICS, LOG, SETTINGS, CONSOLE)
# A folder with one of them is the output folder of a run; one of settings alone is not.
RUN_FILES = (STATUS, METRICS, RUN_LOCK, CONSOLE, START_CONSOLE)
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
        """Return the time of the last change of these files, in seconds since the epoch; 0 if none exists."""
        return max((path.stat().st_mtime for name in names if (path := self.file(name))), default=0.0)


def open_run(folders: Folders, name: str) -> RunFolder:
    """Raises SettingsError for a folder outside the page's folders, or one in which nothing has run."""
    run = RunFolder(folders.resolve(name), folders)
    if not is_run(run.path):
        raise SettingsError(f"there is no run in {folders.shown(run.path)}", "the list of runs shows those there are")
    return run


def is_of_run(folders: Folders, path: Path) -> bool:
    """True for a file in the folder of a run; the page's own folders are none."""
    below = (folder for folder in path.parents if any(root in folder.parents for root in folders.roots))
    return any(is_run(folder) for folder in below)


def check_run(path: Path) -> None:
    """Raise SettingsError for a folder in which nothing has run, or that is not there."""
    if not is_run(path):
        raise SettingsError(f"there is no run in {path}", "name the output folder of a run, its output_dir")


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


ENTRY = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?P<source>\[[^\]]*\] )?(?P<text>.*)")
KINDS = ("warning", "error", "traceback")
# Of the end of a log.
MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A message of a run; its further lines are indented."""

    time: str
    source: str
    text: str
    hint: str = ""

    @property
    def kind(self) -> str:
        """Return `warning`, `error` or `traceback`; empty for anything else."""
        return next((kind for kind in KINDS if self.text.startswith((f"{kind}:", f"{kind}\n"))), "")

    @property
    def message(self) -> str:
        return self.text.removeprefix(f"{self.kind}: ") if self.kind else self.text


@dataclass(frozen=True)
class Log:
    """The entries of a log, or of its end."""

    entries: list[Entry]
    is_cut: bool

    @property
    def problems(self) -> list[Entry]:
        """Warnings and errors of the last start."""
        return [entry for entry in self.entries[self.start :] if entry.kind]

    @property
    def earlier_problems(self) -> list[Entry]:
        return [entry for entry in self.entries[: self.start] if entry.kind]

    @property
    def start(self) -> int:
        """Index of the first entry of the last start; 0 where that is further back than this end of a log."""
        starts = (index for index in reversed(range(len(self.entries))) if self.entries[index].text.startswith(STARTED))
        return next(starts, 0)


def read_log(run: RunFolder) -> Log:
    text = run.tail(LOG, MAX_BYTES)
    return Log(parse_log(text), len(text.encode("utf-8", "replace")) >= MAX_BYTES)


def parse_log(text: str) -> list[Entry]:
    """Parse lines; one that does not begin with a time belongs to the entry before it."""
    entries: list[Entry] = []
    for found, lines in messages_in(text):
        message = "\n".join(lines)
        if message.startswith("hint: ") and entries and entries[-1].kind and not entries[-1].hint:
            entries[-1] = replace(entries[-1], hint=message.removeprefix("hint: "))
        else:
            entries.append(Entry(found["time"], (found["source"] or "").strip(), message))
    return entries


def messages_in(text: str) -> list[tuple[re.Match[str], list[str]]]:
    """Return the first line of each message as parsed, and the text of all its lines."""
    messages: list[tuple[re.Match[str], list[str]]] = []
    # Not splitlines(), which also breaks at a form feed or U+2028 within a message.
    for line in text.removesuffix("\n").split("\n"):
        found = ENTRY.fullmatch(line)
        if found is not None:
            messages.append((found, [found["text"]]))
        elif messages:
            messages[-1][1].append(line)
    return messages
