"""Checkpoints as pages list them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from simpletuner.checkpoints.layout import file_sizes, list_checkpoints, parse_step
from simpletuner.system.numbers import format_gb

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
        shown = format_gb(size) if size >= 10**9 else f"{size / 10**6:,.1f} MB"
        yield CheckpointRow(folder.name, parse_step(folder), shown, written)
