"""Metrics of a run: `metrics.jsonl`, a loss curve, and trackers. Only rank 0 writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from simpletuner.errors import naming
from simpletuner.run_log import APPEND, LOGGER
from simpletuner.runs.charts import CURVE, draw_loss
from simpletuner.runs.metrics import MAX_BYTES, METRICS, MetricColumns, read_columns, rows_in
from simpletuner.system.files.atomic import refuse_special, write_file
from simpletuner.system.files.mounts import sync
from simpletuner.system.files.regular_files import Warn, read_file, set_aside

if TYPE_CHECKING:
    from simpletuner.session import Session


class Tracker(Protocol):
    """A destination of metrics and images; values are named `group/name`. Failures must not raise."""

    def write(self, row: Mapping[str, Any], group: str) -> None: ...

    def add_image(self, path: Path, step: int) -> None: ...

    def close(self) -> None: ...


OpenTrackers = Callable[[int], Sequence[Tracker]]
"""Opens trackers for a run that goes on after a step."""


class Metrics:
    """Append a JSON object per optimizer step and per evaluation; rows after the checkpoint that a run
    resumes from are dropped."""

    def __init__(
        self, folder: Path, step: int, open_trackers: OpenTrackers | None = None, warn: Warn = LOGGER.warning
    ) -> None:
        self.path, self.curve = folder / METRICS, folder / CURVE
        drop_rows_after(self.path, step, warn)
        self.file = os.fdopen(os.open(self.path, APPEND, 0o666), "a", encoding="utf-8")
        self.trackers = open_trackers(step) if open_trackers is not None else ()

    def write(self, row: Mapping[str, Any], group: str = "train") -> None:
        """Add a row; trackers show its values as `group/name`."""
        with naming(self.path):
            self.file.write(json.dumps(row) + "\n")
            # At each row: the page and wandb's process read the file while it grows.
            self.file.flush()
        shown = {name: value for name, value in row.items() if isinstance(value, int | float)}
        for tracker in self.trackers:
            tracker.write(shown, group)

    def sync(self) -> None:
        # s3fs shows an open file to nobody, and loses it with its machine.
        with naming(self.path):
            sync(self.file.fileno())

    def add_image(self, path: Path, step: int) -> None:
        """Show a validation grid in the trackers."""
        for tracker in self.trackers:
            tracker.add_image(path, step)

    def last_step(self, names: Collection[str]) -> int:
        """Return the last step for which one of these values was written; -1 for none."""
        columns = MetricColumns(self.path, names).update()
        return max(columns.column(name).last_step for name in names)

    def close(self) -> None:
        self.file.close()
        draw_loss(read_columns(self.path), self.curve)
        for tracker in self.trackers:
            tracker.close()


def drop_rows_after(path: Path, step: int, warn: Warn = LOGGER.warning) -> None:
    """Drop the rows after a step, atomically, and a torn one; all where a run begins at step 0.

    A file without such rows is not rewritten. One with lines that this version cannot read is moved aside.
    """
    refuse_special(path)
    content = read_file(path, MAX_BYTES) if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True) if step > 0 else []
    rows = [(line, row["step"]) for line in lines for row in rows_in(line)]
    if len(rows) < len(lines):
        set_aside(path, warn)
    kept = [line for line, of_step in rows if of_step <= step]
    if sum(map(len, kept)) < len(content):
        write_file(path, *kept)


@contextmanager
def open_metrics(session: Session, step: int, open_trackers: OpenTrackers | None = None) -> Iterator[Metrics | None]:
    """Open the files and trackers on rank 0, and close them however the run ends; None on other ranks."""
    if not session.world.is_first:
        yield None
        return
    metrics = Metrics(session.settings.training.output_dir, step, open_trackers, session.report.warn)
    try:
        yield metrics
    finally:
        metrics.close()
