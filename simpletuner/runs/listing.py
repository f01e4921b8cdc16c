"""Runs as rows of a list: condition, steps, loss and time left, read again only after changes.

Every open list asks every two seconds. With 200 runs that have ended, an answer takes 600 calls of lstat, and
no file is read.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from simpletuner.run_log import START_CONSOLE
from simpletuner.runs.condition import Condition, KnownStart, find_condition, find_refusal
from simpletuner.runs.folder import FILES, MAX_DEPTH, MAX_RUNS, RUN_FILES, SKIPPED, Folders, RunFolder, is_of_run
from simpletuner.runs.settings_record import SETTINGS, base_of, read_settings
from simpletuner.status_line import format_seconds
from simpletuner.system.files.locks import RUN_LOCK
from simpletuner.system.processes.run_status import ENDS, STATUS, RunState, RunStatus, read_status


@dataclass(frozen=True)
class Summary:
    run: RunFolder
    condition: Condition
    status: RunStatus
    model: str
    written: float
    """Time at which one of its files was last written, in seconds since 1970."""
    refused: Condition | None
    """Why a later start than the one that the condition is about did not begin."""
    config: str
    """The configuration that it was started with, which starts it again; empty where the page cannot."""
    base: str = ""
    """The base model that its settings name, to be shown and agreed to."""

    @property
    def time_left(self) -> str:
        left = self.status.seconds_left
        return format_seconds(left) if self.condition.state is RunState.RUNNING and left is not None else ""


def read_status_of(run: RunFolder) -> RunStatus | None:
    return read_status(path) if (path := run.file(STATUS)) is not None else None


def summarize(run: RunFolder, known: KnownStart) -> Summary:
    status = read_status_of(run)
    condition = find_condition(run, status, known)
    settings = (read_settings(path) if (path := run.file(SETTINGS)) is not None else None) or {}
    return Summary(
        run,
        condition,
        status or RunStatus(RunState.STARTING),
        model=" ".join(str(settings.get(name) or "") for name in ("model_family", "model_flavour")).strip(),
        written=run.written(*FILES),
        refused=find_later_refusal(run, condition) if status is not None and condition.has_ended else None,
        config=config_of(run, status.config if status is not None else known.config),
        base=base_of(settings),
    )


def find_later_refusal(run: RunFolder, condition: Condition) -> Condition | None:
    refused = find_refusal(run)
    return refused if refused is not None and refused.sentence != condition.sentence else None


def config_of(run: RunFolder, config: str) -> str:
    """Return the name of the file of settings that a run was started with, if with nothing else.

    None in the folder of a run, which may be somebody else's.
    """
    if not config or not run.folders.holds(config):
        return ""
    path = run.folders.resolve(config)
    return run.folders.shown(path) if path.is_file() and not is_of_run(run.folders, path) else ""


Signature = tuple[tuple[int, int, int] | None, ...]
"""Stamps (mtime, size, inode) of the files a summary is computed from; None if missing. They are the status,
the output of the start, which a refused start has alone, and, without a status, the lock."""

SETTLED = ENDS | {RunState.UNKNOWN}
"""States that only a file can change."""
# Folders of a run besides SKIPPED. In others there may be runs: `output` is the
# default folder, and `output/cat` that of cat.toml.
OF_RUN = re.compile(r"validation|logs|profile|data_listings|pipeline.*|base-.*")
# Lifetime of the summary of a run that has not ended, however many ask.
LIVE_SECONDS = 1.0
# Within this time of a change, a folder may change again without another time: clocks of file systems are
# coarse.
SETTLED_SECONDS = 1.0


@dataclass(frozen=True)
class ListedFolder:
    """A folder as it was listed: whether it is that of a run, and the folders to look into."""

    signature: tuple[int, int]
    is_run: bool
    below: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """A summary, what it was made from, and when, in seconds of time.monotonic()."""

    signature: Signature
    made: float
    summary: Summary


class StartedRuns(Protocol):
    """Knowledge of the runs that this process has started itself."""

    def known(self, run: RunFolder) -> KnownStart: ...

    def is_started(self, output: Path) -> bool: ...


class NoStartedRuns:
    """A command that lists runs has started none of them."""

    def known(self, run: RunFolder) -> KnownStart:
        return KnownStart()

    def is_started(self, output: Path) -> bool:
        return False


class RunList:
    """Runs and summaries for all visitors of a page."""

    def __init__(self, folders: Folders, processes: StartedRuns) -> None:
        self.folders, self.processes = folders, processes
        self.listed: dict[str, ListedFolder] = {}
        self.kept: dict[str, Kept] = {}
        self.lock = threading.Lock()

    def runs(self) -> list[RunFolder]:
        """Return the runs, those that were written last first."""
        with self.lock:
            return [RunFolder(Path(path), self.folders) for path, _ in self._newest()]

    def summaries(self) -> list[Summary]:
        """Return the summaries of the runs; those that nothing has changed are the same objects as before."""
        with self.lock:
            newest = self._newest()
            kept = {path: self._summary(path, signature) for path, signature in newest}
            self.kept = kept
            return [each.summary for each in kept.values()]

    def _summary(self, path: str, signature: Signature) -> Kept:
        before, now = self.kept.get(path), time.monotonic()
        if before is not None and before.signature == signature and not self._may_change(before, now):
            return before
        run = RunFolder(Path(path), self.folders)
        summary = summarize(run, self.processes.known(run))
        same = before is not None and before.summary == summary
        return Kept(signature, now, before.summary if before is not None and same else summary)

    def _may_change(self, kept: Kept, now: float) -> bool:
        is_settled = kept.summary.condition.state in SETTLED and not self.processes.is_started(kept.summary.run.path)
        return not is_settled and now - kept.made > LIVE_SECONDS

    def _newest(self) -> Sequence[tuple[str, Signature]]:
        found = dict(run for root in self.folders.roots for run in self._walk(str(root), 0))
        return sorted(found.items(), key=lambda run: -last_written(run[1]))[:MAX_RUNS]

    def _walk(self, folder: str, depth: int) -> Iterator[tuple[str, Signature]]:
        """Yield the folders of runs. Their own folders are not walked: many files, and never another run."""
        listed = self._list(folder, self.listed.get(folder))
        if listed is not None and listed.is_run:
            yield folder, signature_of(folder)
        if listed is not None and depth < MAX_DEPTH:
            for name in listed.below:
                yield from self._walk(f"{folder}/{name}", depth + 1)

    def _list(self, folder: str, before: ListedFolder | None) -> ListedFolder | None:
        """Return the listing of a folder: the earlier one if it has not changed, None if it is gone."""
        try:
            status = os.lstat(folder)
        except OSError:
            self.listed.pop(folder, None)
            return None
        signature = (status.st_mtime_ns, status.st_ino)
        if before is not None and before.signature == signature:
            return before
        listed = list_folder(folder, signature)
        if listed.is_run or time.time() - status.st_mtime > SETTLED_SECONDS:
            self.listed[folder] = listed
        return listed


def list_folder(folder: str, signature: tuple[int, int]) -> ListedFolder:
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return ListedFolder(signature, is_run=False, below=())
    is_run = any(each.name in RUN_FILES and each.is_file() for each in found)
    kept = (each for each in found if not each.name.startswith(".") and each.name not in SKIPPED)
    kept = (each for each in kept if not (is_run and OF_RUN.fullmatch(each.name)))
    below = sorted(each.name for each in kept if each.is_dir(follow_symlinks=False))
    return ListedFolder(signature, is_run, tuple(below))


def signature_of(folder: str) -> Signature:
    status, console = stat_or_none(f"{folder}/{STATUS}"), stat_or_none(f"{folder}/{START_CONSOLE}")
    return (status, console) if status is not None else (None, console, stat_or_none(f"{folder}/{RUN_LOCK}"))


def stat_or_none(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def last_written(signature: Signature) -> int:
    return max((each[0] for each in signature if each is not None), default=0)
