"""Checks of datasets in processes that outlive the page, and the folders of their results."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from starlette.requests import Request

from simpletuner import __version__
from simpletuner.errors import EnvironmentNotReady, SettingsError, SimpleTunerError
from simpletuner.page.child_processes import launch
from simpletuner.page.editing.documents import Document, load_document
from simpletuner.page.rendering import folders_of
from simpletuner.page.runs.processes import is_in_use, processes_of, signal_holder
from simpletuner.runs.condition import find_condition
from simpletuner.runs.folder import Folders, RunFolder
from simpletuner.runs.listing import read_status_of
from simpletuner.settings import Settings
from simpletuner.system.files.atomic import remove
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.checksums import value_checksum
from simpletuner.system.files.lease import Holding
from simpletuner.system.files.lease_folder import holder_of
from simpletuner.system.files.locks import RUN_LOCK
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.processes.run_status import STATUS, RunState, RunStatus

if TYPE_CHECKING:
    from simpletuner.tools.dataset.listing import DatasetListing

# Name of the file that `tools/dataset/listing.py` writes, which takes half a second to import.
LISTING = "datasets.json"
EXIT_SECONDS = 5.0
# Configurations whose results are kept; 100,000 images take 20 MB.
MAX_KEPT = 12


@dataclass(frozen=True)
class CheckState:
    """Progress of a check, or the failure of the last one."""

    is_running: bool = False
    doing: str = "starting"
    done: int = 0
    total: int = 0
    error: SimpleTunerError | None = None


@dataclass(frozen=True)
class Checked:
    """A configuration, and the folder with what was found in its datasets."""

    document: Document
    run: RunFolder
    """The folder of results: it has the lock, status and console of a run."""

    @classmethod
    def of(cls, request: Request, file: str) -> Checked:
        """Raises SettingsError for a file outside the page's folders, or one that does not parse."""
        document = Document.read(folders_of(request), file)
        path = (kept_folder() / result_name(folders_of(request).resolve(file))).resolve()
        return cls(document, RunFolder(path, Folders((path,))))

    def settings(self, request: Request) -> Settings:
        """Raises SettingsError for mistakes, and for settings that name files outside the page's folders."""
        return load_document(self.document, folders_of(request), os.environ).settings

    def found(self) -> DatasetListing | None:
        """Read the results of the last check; None if there are none, or another version wrote them."""
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(read_file(self.run.path / LISTING))
            if isinstance(found, dict) and found.get("version") == __version__:
                return cast("DatasetListing", found)  # each version reads what itself has written alone
        return None

    def is_outdated(self, found: DatasetListing) -> bool:
        """True if the file of settings was written after the check."""
        return self.document.path.stat().st_mtime > found["checked"]


def kept_folder() -> Path:
    return user_home() / "datasets"


def result_name(config: Path) -> str:
    return value_checksum({"file": str(config)}).rpartition(":")[2]


def check_state(request: Request, checked: Checked) -> CheckState:
    if not checked.run.path.is_dir():
        return CheckState()
    status = read_status_of(checked.run)
    # Before the condition: what would end a run is printed after the results, and is no failed check.
    if status is not None and status.has_ended:
        failed = status.state is not RunState.FINISHED
        return CheckState(error=EnvironmentNotReady(status.reason, status.hint) if failed else None)
    condition = find_condition(checked.run, status, processes_of(request).known(checked.run))
    if condition.state is RunState.FAILED:
        return CheckState(error=EnvironmentNotReady(condition.sentence, condition.hint))
    if condition.has_ended:
        return CheckState(error=EnvironmentNotReady("the check was ended before it was done", "begin it again"))
    if condition.state is RunState.UNKNOWN:  # nothing has run
        return CheckState()
    return CheckState(True, status.doing or "starting", status.done, status.total) if status else CheckState(True)


def start_check(request: Request, checked: Checked, decode: bool) -> None:
    """Start a check, unless one is running. Raises SettingsError for mistakes in the settings."""
    checked.settings(request)
    run, processes = checked.run, processes_of(request)
    await_exit(processes.started.get(run.path), read_status_of(run))
    with request.app.state.saving:  # two tabs start one
        if is_in_use(processes, run):
            return
        run.path.mkdir(parents=True, exist_ok=True)
        remove_oldest(run.path)
        (run.path / STATUS).unlink(missing_ok=True)  # it is of the last check
        processes.started[run.path] = launch(run, arguments_for(checked, decode), Path.cwd())


def await_exit(process: subprocess.Popen[bytes] | None, status: RunStatus | None) -> None:
    # Till its exit it would count as the check to begin.
    if process is not None and status is not None and status.has_ended:
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_SECONDS)


def arguments_for(checked: Checked, decode: bool) -> list[str]:
    listing = f"--listing={checked.run.path}"
    # Of 100,000 files or more only the times of folders are looked at without --rescan, which do not tell of
    # files that were written in place.
    kind = "--rescan" if decode else "--headers_only"
    return ["dataset", "check", f"--config={checked.document.path}", listing, kind]


def remove_oldest(kept: Path) -> None:
    """Remove the results of the configurations that were checked longest ago, unless a check writes there."""
    others = sorted((path for path in kept.parent.iterdir() if path.is_dir() and path != kept), key=last_change)
    for path in others[: max(0, len(others) + 1 - MAX_KEPT)]:
        if holder_of(path / RUN_LOCK)[1] is Holding.FREE:
            remove(path)


def last_change(path: Path) -> float:
    return path.stat().st_mtime


def stop_check(checked: Checked) -> None:
    with suppress(SettingsError):  # it has just ended
        signal_holder(checked.run)
