"""Parsed metrics and known images of runs, kept between requests, and charts of them.

Polling costs what is new.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path

from simpletuner.runs.charts import Chart, compare, make_charts
from simpletuner.runs.folder import RunFolder
from simpletuner.runs.gallery import Gallery
from simpletuner.runs.health.best_step import Measured, read_measured
from simpletuner.runs.metrics import HELD_OUT, METRICS, WINDOW_SHARE, MetricColumns

MAX_WATCHED = 12
"""Runs whose metrics and images are kept."""


@dataclass
class WatchedRun:
    """Metrics and images of one run; readers hold the lock, since requests come in several threads."""

    columns: MetricColumns
    gallery: Gallery
    started: float
    lock: threading.Lock = dataclass_field(default_factory=threading.Lock)
    measured: tuple[list[int], list[Measured]] = dataclass_field(default_factory=lambda: ([], []))

    def held_out(self, output: Path) -> list[Measured]:
        """Return the held-out losses, read again only where there are others."""
        columns = [self.columns.column(name) for name in HELD_OUT]
        known = [number for each in columns for number in (each.points, each.last_step)]
        if self.measured[0] != known:
            self.measured = known, read_measured(output) if any(each.points for each in columns) else []
        return self.measured[1]


class Watched:
    """The runs that were looked at last."""

    def __init__(self) -> None:
        self.runs: OrderedDict[Path, WatchedRun] = OrderedDict()
        self.lock = threading.Lock()

    def of(self, run: RunFolder) -> WatchedRun:
        with self.lock:
            started = start_of(run)
            known = self.runs.pop(run.path, None)
            # A start may go back to an earlier checkpoint, and make images of the same names again.
            if known is None or known.started != started:
                known = WatchedRun(MetricColumns(run.path / METRICS), Gallery(run.path), started)
            self.runs[run.path] = known
            while len(self.runs) > MAX_WATCHED:
                self.runs.popitem(last=False)
            return known


def start_of(run: RunFolder) -> float:
    """Return a number that only starts of this run have."""
    record, _ = run.lease
    with suppress(ValueError, FileNotFoundError):  # of a record that somebody else wrote
        return int(record.id[:8], 16) if record.id else run.lock.lstat().st_mtime
    return 0.0


SMOOTHING = {"none": 0.0, "little": 0.01, "medium": WINDOW_SHARE, "strong": 0.2}
"""Share of all steps that a running mean is over."""


def charts_of(watched: Watched, runs: list[RunFolder], smoothing: float) -> list[Chart]:
    """Return the charts of a run, or where there are several, one curve for each of them per metric."""
    with ExitStack() as reading:
        known = {run.path: watched.of(run) for run in runs}
        for path in sorted(known):  # in one order, or two requests would wait for each other
            reading.enter_context(known[path].lock)
        columns = {run.name: known[run.path].columns for run in runs}
        if len(columns) == 1:
            return make_charts(next(iter(columns.values())), smoothing)
        return list(compare(columns, smoothing))


def update(watched: Watched, runs: list[RunFolder]) -> list[int]:
    """Read what is new, and return how far each file was read: the same numbers mean the same charts."""
    offsets = []
    for run in runs:
        known = watched.of(run)
        with known.lock:
            if run.file(METRICS) is not None:
                known.columns.update()
            offsets += [known.columns.reader.offset, round(known.started)]
    return offsets
