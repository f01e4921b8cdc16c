"""A run in a row of the list: its condition, steps, loss and time left."""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.page.runs.condition import Condition, Known, State, find_condition, find_refusal
from simpletuner.page.runs.folder import FILES, RunFolder, is_of_run
from simpletuner.status_line import format_seconds
from simpletuner.system.processes.run_status import STATUS, RunState, RunStatus, read_status
from simpletuner.tools.recorded_settings import base_of
from simpletuner.training.run_folder.settings_record import SETTINGS, read_settings


@dataclass(frozen=True)
class Summary:
    """A summary of a run in one line."""

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
        return format_seconds(left) if self.condition.state is State.RUNNING and left is not None else ""


def read_status_of(run: RunFolder) -> RunStatus | None:
    return read_status(path) if (path := run.file(STATUS)) is not None else None


def summarize(run: RunFolder, known: Known) -> Summary:
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
