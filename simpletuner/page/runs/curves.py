"""Charts of one run, or of several over one another."""

from __future__ import annotations

from contextlib import ExitStack

from simpletuner.page.runs.folder import RunFolder
from simpletuner.page.runs.watching import Watched
from simpletuner.training.metrics.charts import Chart, make_charts
from simpletuner.training.metrics.comparison import compare
from simpletuner.training.metrics.curves import WINDOW_SHARE
from simpletuner.training.metrics.metrics_reader import METRICS

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
