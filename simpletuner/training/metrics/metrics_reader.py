"""Reading `metrics.jsonl`, whole or as it grows. No torch: the process that sends metrics to wandb reads it, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner.system.files.regular_files import open_regular, read_end
from simpletuner.training.metrics.curves import running_mean, window_of

METRICS = "metrics.jsonl"

LOSSES = ("loss", "eval_loss", "eval_loss_ema")
"""Every row of the metrics has a step, and at least one of these."""

TAIL_BYTES = 64 << 10
MAX_BYTES = 4 << 30
"""The largest file of metrics that is read: 15 million rows of 280 bytes."""
NUMBERS = {int, float, bool}
# Up to which float64 has all integers.
LARGEST_INTEGER = 1 << 53


class MetricsReader:
    """Parse a metrics file once: each `read` returns the rows that were appended since the one before."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.last_line = path, 0, b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return new rows, and whether they begin at the start of the file: it is new, was replaced or was cut.

        A last line without a newline is still being written; it is returned once it is whole.
        """
        content, from_start = self._appended()
        end = content.rfind(b"\n") + 1
        if end:
            self.offset += end
            self.last_line = content[content.rfind(b"\n", 0, end - 1) + 1 : end]
        return rows_in(content[:end]), from_start

    def _appended(self) -> tuple[bytes, bool]:
        """Return the content after the last line that was read, or the whole file if that line has moved.

        A start drops the rows after its checkpoint and appends others, so a file may have been replaced and be longer.
        Its inode would not tell, since file systems use them again; timings make each row differ from all others.
        """
        try:
            with open_regular(self.path, MAX_BYTES) as file:
                file.seek(self.offset - len(self.last_line))
                is_same = file.read(len(self.last_line)) == self.last_line
                if not is_same:
                    file.seek(0)
                    self.offset, self.last_line = 0, b""
                return file.read(), self.offset == 0
        except FileNotFoundError:
            self.offset, self.last_line = 0, b""
            return b"", True


class MetricColumn:
    """The values of one metric by step, in an array that grows by doubling."""

    def __init__(self) -> None:
        self.points, self.count = np.empty((2, 256)), 0

    def extend(self, steps: Sequence[float], values: Sequence[float]) -> None:
        count = self.count + len(values)
        if count > self.points.shape[1]:
            grown = np.empty((2, max(count, 2 * self.points.shape[1])))
            grown[:, : self.count] = self.points[:, : self.count]
            self.points = grown
        self.points[:, self.count : count] = steps, values
        self.count = count


class MetricColumns:
    """The metrics of a run as columns; `update` parses only what was appended to the file."""

    def __init__(self, path: Path, column: Callable[[], Any] = MetricColumn) -> None:
        self.reader, self.new_column = MetricsReader(path), column
        self.columns: dict[str, Any] = {}

    def update(self) -> MetricColumns:
        """Read what is new, and return self. After a file was replaced, only what it has now is left."""
        rows, from_start = self.reader.read()
        if from_start:
            self.columns.clear()
        # Most rows have the same names as the one before: columns of 100,000 such take 0.1 s, values one by one 0.5 s.
        for names, alike in groupby(rows, key=tuple):
            self._extend(names, list(zip(*(row.values() for row in alike), strict=True)))
        return self

    def _extend(self, names: tuple[str, ...], columns: Sequence[Sequence[Any]]) -> None:
        steps = columns[names.index("step")]
        for name, values in zip(names, columns, strict=True):
            kept = steps
            if not NUMBERS.issuperset(map(type, values)):
                pairs = [(step, value) for step, value in zip(steps, values, strict=True) if type(value) in NUMBERS]
                kept, values = zip(*pairs, strict=True) if pairs else ((), ())
            if values:
                self.columns.setdefault(name, self.new_column()).extend(kept, values)

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and the values of a metric, both (points,) float64; empty for one that was never written."""
        column = self.columns.get(name) or MetricColumn()
        steps, values = column.points[:, : column.count]
        return steps, values

    def finite(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the points of a metric whose value can be drawn."""
        steps, values = self.points(name)
        kept = np.isfinite(values)
        return steps[kept], values[kept]

    def smoothed(self, name: str, share: float) -> tuple[int, np.ndarray]:
        """Return the window of a running mean over a share of all points, and its values at the points of `finite`."""
        values = self.finite(name)[1]
        window = window_of(len(values), share)
        return window, running_mean(values, window)


def read_columns(path: Path) -> MetricColumns:
    """Return all metrics of a file; empty if there is no file."""
    return MetricColumns(path).update()


def last_row(path: Path) -> dict[str, Any]:
    """Return the last row of an optimizer step; empty where there is none. Reads the end of the file alone."""
    rows = [row for row in rows_in(read_end(path, TAIL_BYTES)) if "loss" in row]
    return rows[-1] if rows else {}


def rows_in(content: bytes) -> list[dict[str, Any]]:
    """Return the rows in the content of a metrics file; a line torn by a killed run, or damaged, is left out."""
    return [row for row in parse_lines(content.removesuffix(b"\n").split(b"\n")) if is_row(row)]


def parse_lines(lines: Sequence[bytes]) -> list[Any]:
    """Return the values of JSON lines that can be parsed."""
    # All at once is a third faster. A line that begins or ends otherwise is torn, and could be joined with another one.
    if all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
        try:
            rows = json.loads(b"[" + b",".join(lines) + b"]")
            if len(rows) == len(lines):
                return rows
        except (ValueError, RecursionError):
            pass
    return [row for line in lines for row in parse_line(line)]


def parse_line(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        return []


def is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    step, loss = row.get("step"), row.get(loss_of(row))
    # JSON as Python reads it has Infinity, NaN and integers that no float can hold.
    return (
        isinstance(step, float | int)
        and abs(step) <= LARGEST_INTEGER
        and (isinstance(loss, float) or (isinstance(loss, int) and abs(loss) <= LARGEST_INTEGER))
    )


def loss_of(row: Mapping[str, Any]) -> str:
    """Return which loss a row has; `loss` where it has none."""
    return next((name for name in LOSSES if name in row), "loss")
