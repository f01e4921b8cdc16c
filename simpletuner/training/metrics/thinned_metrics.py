"""Metrics of any number of steps in a few thousand points, updated as a file grows: as many as a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simpletuner.training.metrics.curves import running_mean, window_of
from simpletuner.training.metrics.metrics_reader import MetricColumns

# Between half as many and these are kept; a chart has 600 columns. Must be even.
MAX_BLOCKS = 4096


class ThinnedColumn:
    """A metric as blocks of equally many points, of which the least, the greatest and the mean are kept.

    Blocks hold one point each until there are MAX_BLOCKS; whenever there are, two become one. So adding a point costs
    the same after a million others.
    """

    def __init__(self) -> None:
        self.size, self.count, self.points = 1, 0, 0
        self.low, self.high, self.mean = (np.empty((2, MAX_BLOCKS)) for _ in range(3))
        """Steps and values, (2, blocks)."""
        self.tail = np.empty((2, 0))
        """Points that do not fill a block yet."""

    def extend(self, steps: Sequence[float], values: Sequence[float]) -> None:
        """Add points; those that cannot be drawn are left out."""
        added = np.array([steps, values], dtype=np.float64)
        added = added[:, np.isfinite(added[1])]
        self.points += added.shape[1]
        self.tail = np.concatenate([self.tail, added], axis=1)
        while blocks := min(self.tail.shape[1] // self.size, MAX_BLOCKS - self.count):
            full, self.tail = np.split(self.tail, [blocks * self.size], axis=1)
            self._add(full.reshape(2, blocks, self.size))
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
        """Return the least and the greatest point of each block in the order of their steps, and the last points."""
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

    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean step and value of each block, and of the points that do not fill one."""
        rest = [self.tail.mean(axis=1, keepdims=True)] if self.tail.size else []
        steps, values = np.concatenate([self.mean[:, : self.count], *rest], axis=1)
        return steps, values


def summarized(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the least, the greatest and the mean of the points of each block, (2, blocks) of (2, blocks, points)."""
    low, high = (np.expand_dims(of(points[1], axis=1), (0, 2)) for of in (np.argmin, np.argmax))
    chosen = [np.take_along_axis(points, np.broadcast_to(at, (2, *at.shape[1:])), 2)[..., 0] for at in (low, high)]
    return chosen[0], chosen[1], points.mean(axis=2)


class ThinnedColumns(MetricColumns):
    """Metrics of a run, thinned out for charts. The cost of a new line does not depend on the length of the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ThinnedColumn)

    def finite(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self._column(name).extremes()

    def smoothed(self, name: str, share: float) -> tuple[int, np.ndarray]:
        column = self._column(name)
        steps, means = column.means()
        drawn = column.extremes()[0]
        values = running_mean(means, window_of(len(means), share)) if len(means) else means
        return window_of(column.points, share), np.interp(drawn, steps, values) if len(means) else values

    def _column(self, name: str) -> ThinnedColumn:
        return self.columns.get(name) or ThinnedColumn()
