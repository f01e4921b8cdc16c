"""Cache of a run's data between requests: parsed metrics and known images. Polling then costs what is new."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from simpletuner.page.runs.folder import RunFolder
from simpletuner.training.html_report.thumbnails import Gallery
from simpletuner.training.metrics.metrics_reader import METRICS
from simpletuner.training.metrics.thinned_metrics import ThinnedColumns

MAX_WATCHED = 12
"""Runs whose metrics and images are kept."""


@dataclass
class WatchedRun:
    """Metrics and images of one run; whoever reads them holds the lock, since requests come in several threads."""

    columns: ThinnedColumns
    gallery: Gallery
    started: float
    lock: threading.Lock = field(default_factory=threading.Lock)


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
                known = WatchedRun(ThinnedColumns(run.path / METRICS), Gallery(run.path), started)
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
