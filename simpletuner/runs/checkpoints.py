"""The checkpoints in a run's folder: complete ones, later ones, and their rows in lists. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.filesize import decimal

from simpletuner.checkpoints.layout import NAME, file_sizes, list_checkpoints, load_checkpoint, parse_step
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.runs.folder import RunFolder

TIME = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint as the page lists it."""

    name: str
    step: int
    size: str
    written: float
    """Seconds since 1970."""

    @property
    def time(self) -> str:
        return datetime.fromtimestamp(self.written, UTC).strftime(TIME)


def checkpoint_rows(output: Path) -> Iterator[CheckpointRow]:
    """Yield the checkpoints, newest first; one that is being removed is left out."""
    for folder in list_checkpoints(output / "checkpoints"):
        try:
            size, written = sum(file_sizes(folder).values()), folder.stat().st_mtime
        except OSError:
            continue
        yield CheckpointRow(folder.name, parse_step(folder), decimal(size), written)


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
    if not run.holds_folder("checkpoints"):
        return []
    rows = [row for row in checkpoint_rows(run.path) if run.holds_folder(f"checkpoints/{row.name}")]
    return [examine(run, row, later) for later, row in enumerate(rows)]


def examine(run: RunFolder, row: CheckpointRow, later: int) -> ListedCheckpoint:
    """Compare a checkpoint's state and file sizes with what it should have; contents are not read."""
    try:
        checkpoint = load_checkpoint(run.path / "checkpoints" / row.name)
    except EnvironmentNotReady as error:
        return ListedCheckpoint(row, error.message.replace(f"{run.path}/", ""), False, later)
    return ListedCheckpoint(row, "", checkpoint.state["ema_updates"] is not None, later)


def named_checkpoint(run: RunFolder, name: str) -> ListedCheckpoint:
    """Checkpoint that a request names. Raises SettingsError where the run has none of that name."""
    if NAME.fullmatch(name):
        for each in list_rows(run):
            if each.row.name == name:
                return each
    raise SettingsError(f"{run.name} has no such checkpoint", "the page of the run shows those there are")
