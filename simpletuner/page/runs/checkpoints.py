"""Checkpoints in the folder of a run: which are complete, and how many are later."""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.checkpoints.layout import NAME, load_checkpoint
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.page.runs.folder import RunFolder
from simpletuner.training.html_report.checkpoint_rows import CheckpointRow, checkpoint_rows


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint in the list; `problem` says why a run cannot go on from it."""

    row: CheckpointRow
    problem: str
    has_average: bool
    """EMA weights, which are exported apart from the trained ones."""
    later: int
    """Number of checkpoints of later steps, which going on from this one sets aside."""


def list_rows(run: RunFolder) -> list[ListedCheckpoint]:
    """Return the checkpoints within the run's folder, newest first."""
    if not run.holds_folder("checkpoints"):
        return []
    rows = [row for row in checkpoint_rows(run.path) if run.holds_folder(f"checkpoints/{row.name}")]
    return [examine(run, row, later) for later, row in enumerate(rows)]


def examine(run: RunFolder, row: CheckpointRow, later: int) -> ListedCheckpoint:
    """Find what is missing of a checkpoint by its state and the sizes of its files; their content is not read."""
    try:
        checkpoint = load_checkpoint(run.path / "checkpoints" / row.name)
    except EnvironmentNotReady as error:
        return ListedCheckpoint(row, error.message.replace(f"{run.path}/", ""), False, later)
    return ListedCheckpoint(row, "", checkpoint.state["ema_updates"] is not None, later)


def named_checkpoint(run: RunFolder, name: str) -> ListedCheckpoint:
    """Return the checkpoint that a request names. Raises SettingsError where the run has none of that name."""
    if NAME.fullmatch(name):
        for each in list_rows(run):
            if each.row.name == name:
                return each
    raise SettingsError(f"{run.name} has no such checkpoint", "the page of the run shows those there are")
