"""`metrics.jsonl`, read whole or as it grows: running means without lag, as few points as a screen shows.

No torch: the process that sends metrics to wandb reads it, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner.system.files.regular_files import open_regular, read_end

# Of all steps: how many the running mean is over.
WINDOW_SHARE = 0.05


def window_of(points: int, share: float = WINDOW_SHARE) -> int:
    """Return the window of a curve's running mean, in points: an odd number."""
    return 2 * max(1, round(points * share / 2)) + 1


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred running mean; near the ends, where the window is truncated, a linear fit.

    A mean of what is there would be that of a point further inside: of a falling loss, too low at first and
    too high at last. An exponential mean lags everywhere.
    """
    count, half, position = len(values), window // 2, np.arange(len(values), dtype=np.float64)
    first, last = np.maximum(position - half, 0).astype(int), np.minimum(position + half + 1, count).astype(int)

    def window_mean(each: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(each)])
        return (sums[last] - sums[first]) / (last - first)

    # Least squares within each window; in the middle the slope has no influence.
    mean_value, mean_position = window_mean(values), window_mean(position)
    spread = window_mean(position**2) - mean_position**2
    # A window of one point has no spread, and no slope.
    slope = (window_mean(position * values) - mean_position * mean_value) / np.maximum(spread, 1e-9)
    return mean_value + slope * (position - mean_position)


def thin_out(steps: np.ndarray, values: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and the highest point of each of `columns` equal parts of a curve, so that no peak is lost."""
    if len(steps) <= 2 * columns:
        return steps, values
    width = -(-len(steps) // columns)
    padded = np.pad(values, (0, -len(steps) % width), mode="edge").reshape(-1, width)
    starts = np.arange(len(padded)) * width
    extremes = np.stack([padded.argmin(axis=1), padded.argmax(axis=1)], axis=1) + starts[:, None]
    kept = np.unique(np.minimum(extremes, len(steps) - 1))
    return steps[kept], values[kept]


METRICS = "metrics.jsonl"

HELD_OUT = ("eval_loss", "eval_loss_ema")
# Most ranges of noise levels whose held-out losses are told apart; name of the n-th of m, least noise first.
LEVELS, LEVEL_OF = 4, "{}_noise_{}of{}"
LOSSES = ("loss", *HELD_OUT)
"""Every row of the metrics has a step, and at least one of these."""

TAIL_BYTES = 64 << 10
# The largest file of metrics that is read: 15 million rows of 280 bytes.
MAX_BYTES = 4 << 30
NUMBERS = {int, float, bool}
# Up to which float64 has all integers.
LARGEST_INTEGER = 1 << 53


class MetricsReader:
    """Parse a metrics file once: each `read` returns the rows that were appended since the one before.

    Of no more than `most` bytes and a line at once; -1: of all.
    """

    def __init__(self, path: Path, most: int = -1) -> None:
        self.path, self.most = path, most
        self.offset = 0
        self.last_line = b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """New rows; and True if they begin at the file's start: it is new, was replaced or was cut.

        A last line without a newline is still being written; it is returned once it is whole.
        """
        content, from_start = self._appended()
        end = content.rfind(b"\n") + 1
        if end:
            self.offset += end
            self.last_line = content[content.rfind(b"\n", 0, end - 1) + 1 : end]
        return rows_in(content[:end]), from_start

    def _appended(self) -> tuple[bytes, bool]:
        """Content after the last line that was read, or the whole file if that line has moved.

        A start drops the rows after its checkpoint and appends others, so a file may have been replaced and
        be longer. Its inode would not tell, since file systems use them again; timings make each row differ
        from all others.
        """
        try:
            with open_regular(self.path, MAX_BYTES) as file:
                file.seek(self.offset - len(self.last_line))
                is_same = file.read(len(self.last_line)) == self.last_line
                if not is_same:
                    file.seek(0)
                    self.offset, self.last_line = 0, b""
                content, from_start = file.read(self.most), self.offset == 0
                return content if self.most < 0 else content + file.readline(), from_start
        except FileNotFoundError:
            self.offset, self.last_line = 0, b""
            return b"", True


# Between half as many and these are kept; a chart has 600 columns. Must be even.
MAX_BLOCKS = 4096
# Of the values at either end of a run, which are told as its result.
ENDS = 20


class MetricColumn:
    """A metric as blocks of equally many points, of which the least, the greatest and the mean are kept.

    Blocks hold one point each until there are MAX_BLOCKS; whenever there are, two become one. So adding a
    point costs the same after a million others, and takes no more memory.
    """

    def __init__(self) -> None:
        self.size = 1
        self.count = 0
        self.points = 0
        self.last_step = -1
        self.first, self.last = np.empty(0), np.empty(0)
        """The first and the last values, ENDS of each."""
        self.low, self.high, self.mean = (np.empty((2, MAX_BLOCKS)) for _ in range(3))
        """Steps and values, (2, blocks)."""
        self.tail = np.empty((2, 0))
        """Points that do not fill a block yet."""

    def extend(self, steps: Sequence[float], values: Sequence[float]) -> None:
        """Add points; those that cannot be drawn are left out."""
        added = np.array([steps, values], dtype=np.float64)
        self.last_step = max(self.last_step, int(added[0].max(initial=-1)))
        added = added[:, np.isfinite(added[1])]
        self.points += added.shape[1]
        self.first = np.concatenate([self.first, added[1, :ENDS]])[:ENDS]
        self.last = np.concatenate([self.last, added[1, -ENDS:]])[-ENDS:]
        self.tail = np.concatenate([self.tail, added], axis=1)
        while blocks := min(self.tail.shape[1] // self.size, MAX_BLOCKS - self.count):
            full, tail = np.split(self.tail, [blocks * self.size], axis=1)
            self._add(full.reshape(2, blocks, self.size))
            self.tail = tail.copy()  # a view would keep all points that were added with these
            if self.count == MAX_BLOCKS:
                self._halve()

    def _add(self, points: np.ndarray) -> None:
        """Add blocks: (2, blocks, points)."""
        new = slice(self.count, self.count + points.shape[1])
        self.low[:, new], self.high[:, new], self.mean[:, new] = summarized(points)
        self.count = new.stop

    def _halve(self) -> None:
        pairs = [each.reshape(2, -1, 2) for each in (self.low, self.high, self.mean)]
        self.size, self.count = 2 * self.size, MAX_BLOCKS // 2
        kept = summarized(pairs[0])[0], summarized(pairs[1])[1], pairs[2].mean(axis=2)
        for mine, half in zip((self.low, self.high, self.mean), kept, strict=True):
            mine[:, : self.count] = half

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Least and the greatest point of each block in the order of their steps, and the last points."""
        low, high = self.low[:, : self.count], self.high[:, : self.count]
        ordered = np.where(low[0] <= high[0], (low, high), (high, low))  # (2, 2, blocks)
        blocks = ordered.transpose(1, 2, 0).reshape(2, -1)
        if self.tail.size:
            tail = summarized(self.tail.reshape(2, 1, -1))
            rest = np.concatenate([*tail[:2], self.tail[:, -1:]], axis=1)
            blocks = np.concatenate([blocks, rest[:, rest[0].argsort()]], axis=1)
        # Where the least and the greatest of a block are one point, it is there twice.
        steps, values = blocks[:, np.diff(blocks[0], prepend=-np.inf) > 0]
        return steps, values

    def means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mean step, mean value and number of points of each block, and of the remaining points."""
        rest = [self.tail.mean(axis=1, keepdims=True)] if self.tail.size else []
        steps, values = np.concatenate([self.mean[:, : self.count], *rest], axis=1)
        return steps, values, np.array([self.size] * self.count + [self.tail.shape[1]] * len(rest))


def summarized(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least, the greatest and the mean of the points of each block, (2, blocks) of (2, blocks, points)."""
    low, high = (np.expand_dims(of(points[1], axis=1), (0, 2)) for of in (np.argmin, np.argmax))
    chosen = [np.take_along_axis(points, np.broadcast_to(at, (2, *at.shape[1:])), 2)[..., 0] for at in (low, high)]
    return chosen[0], chosen[1], points.mean(axis=2)


# Of a metrics file, how much is parsed at once: rows of 280 bytes take four times as much as objects.
PIECE_BYTES = 4 << 20


class MetricColumns:
    """A run's metrics as columns, thinned out for charts; `update` parses only what was appended."""

    def __init__(self, path: Path, names: Collection[str] | None = None) -> None:
        """Keep the metrics of these names, of all without any."""
        self.reader, self.names = MetricsReader(path, PIECE_BYTES), names
        self.columns: dict[str, MetricColumn] = {}

    def update(self) -> MetricColumns:
        """Read what is new, and return self. After a file was replaced, only what it has now is left."""
        offset = None
        while offset != self.reader.offset:
            offset = self.reader.offset
            rows, from_start = self.reader.read()
            if from_start:
                self.columns.clear()
            # Most rows have the same names as the one before: columns of 100,000 such take 0.1 s, values one
            # by one 0.5 s.
            for names, alike in groupby(rows, key=tuple):
                self._extend(names, list(zip(*(row.values() for row in alike), strict=True)))
        return self

    def _extend(self, names: tuple[str, ...], columns: Sequence[Sequence[Any]]) -> None:
        steps = columns[names.index("step")]
        for name, values in zip(names, columns, strict=True):
            if self.names is not None and name not in self.names:
                continue
            kept: Sequence[Any] = steps
            if not NUMBERS.issuperset(map(type, values)):
                pairs = [(step, value) for step, value in zip(steps, values, strict=True) if type(value) in NUMBERS]
                kept, values = zip(*pairs, strict=True) if pairs else ((), ())
            if values:
                self.columns.setdefault(name, MetricColumn()).extend(kept, values)

    def column(self, name: str) -> MetricColumn:
        """A metric; one without points where it was never written."""
        return self.columns.get(name) or MetricColumn()

    def finite(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric to draw, both (points,) float64: all, or each block's extremes."""
        return self.column(name).extremes()

    def smoothed(self, name: str, share: float) -> tuple[int, np.ndarray]:
        """Window of a running mean over a share of all points, and its values at the points of `finite`."""
        column = self.column(name)
        steps, means, _ = column.means()
        drawn = column.extremes()[0]
        values = running_mean(means, window_of(len(means), share)) if len(means) else means
        return window_of(column.points, share), np.interp(drawn, steps, values) if len(means) else values


def read_columns(path: Path) -> MetricColumns:
    """Return all metrics of a file; empty if there is no file."""
    return MetricColumns(path).update()


def level_names(name: str) -> list[str]:
    """Return all names that the losses of ranges of noise levels may have, of a loss on held-out images."""
    return [LEVEL_OF.format(name, number, count) for count in range(2, LEVELS + 1) for number in range(1, count + 1)]


def last_row(path: Path) -> dict[str, object]:
    # The end of the file alone is read.
    rows = [row for row in rows_in(read_end(path, TAIL_BYTES)) if "loss" in row]
    return rows[-1] if rows else {}


def rows_in(content: bytes) -> list[dict[str, Any]]:
    # A line torn by a killed run, or damaged, is left out.
    return [row for row in parse_lines(content.removesuffix(b"\n").split(b"\n")) if is_row(row)]


def parse_lines(lines: Sequence[bytes]) -> list[Any]:
    """Return the values of JSON lines that can be parsed."""
    # All at once is a third faster. A line that begins or ends otherwise is torn, and could join another.
    if all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
        try:
            rows = json.loads(b"[" + b",".join(lines) + b"]")
            if len(rows) == len(lines):
                return rows
        except (ValueError, RecursionError):
            pass
    return [row for line in lines for row in parse_line(line)]


def parse_line(line: bytes) -> list[object]:
    try:
        return [json.loads(line)]
    except (ValueError, RecursionError):
        return []


def is_row(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    step, loss = row.get("step"), row.get(loss_of(row))
    # JSON as Python reads it has Infinity, NaN and integers that no float can hold.
    return (
        isinstance(step, float | int)
        and abs(step) <= LARGEST_INTEGER
        and (isinstance(loss, float) or (isinstance(loss, int) and abs(loss) <= LARGEST_INTEGER))
    )


def loss_of(row: Mapping[str, object]) -> str:
    """Return the name of the loss in a row; `loss` if it has none."""
    return next((name for name in LOSSES if name in row), "loss")
