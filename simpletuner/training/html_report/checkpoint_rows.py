"""Checkpoints as pages list them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.filesize import decimal

from simpletuner.checkpoints.layout import file_sizes, list_checkpoints, parse_step

TIME = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint as the page lists it."""

    name: str
    step: int
    size: str
    written: float
    """In seconds since 1970."""

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
