"""Metrics of a run: `metrics.jsonl`, a loss curve, and trackers. Only rank 0 writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files import APPEND, read_file, write_file
from simpletuner.training.curves import curve_of, running_mean, window_of

if TYPE_CHECKING:  # the process that sends metrics to wandb imports this module, and needs no torch
    from simpletuner.parallel.world import World
    from simpletuner.settings import Settings

METRICS, CURVE = "metrics.jsonl", "loss.png"

LOSSES = ("loss", "eval_loss", "eval_loss_ema")
"""Every row of the metrics has a step, and at least one of these."""

TAIL_BYTES = 64 << 10

HELD_OUT_LINES = {"eval_loss": ("held-out images", "#d94801"), "eval_loss_ema": ("held-out images, EMA", "#238b45")}


class Tracker(Protocol):
    """Where metrics and images are shown; values are named `group/name`. A tracker that fails must not raise."""

    def write(self, row: Mapping[str, Any], group: str) -> None: ...

    def add_image(self, path: Path, step: int) -> None: ...

    def close(self) -> None: ...


OpenTrackers = Callable[[int], Sequence[Tracker]]
"""Opens trackers for a run that goes on after a step."""


class Metrics:
    """Append a JSON object per optimizer step and per evaluation; rows after the checkpoint that a run resumes from are
    dropped."""

    def __init__(self, folder: Path, step: int, open_trackers: OpenTrackers | None = None) -> None:
        self.path, self.curve = folder / METRICS, folder / CURVE
        drop_rows_after(self.path, step)
        self.file = os.fdopen(os.open(self.path, APPEND, 0o666), "a", encoding="utf-8")
        self.trackers = open_trackers(step) if open_trackers is not None else ()

    def write(self, row: Mapping[str, Any], group: str = "train") -> None:
        """Add a row; trackers show its values as `group/name`."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        for tracker in self.trackers:
            tracker.write(row, group)

    def add_image(self, path: Path, step: int) -> None:
        """Show a validation grid in the trackers."""
        for tracker in self.trackers:
            tracker.add_image(path, step)

    def last_step(self, name: str) -> int:
        """Return the last step for which a value was written; -1 for none."""
        return max((row["step"] for row in read_metrics(self.path) if name in row), default=-1)

    def close(self) -> None:
        """Plot the loss and close the files."""
        self.file.close()
        plot_loss(read_metrics(self.path), self.curve)
        for tracker in self.trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; a line torn by a killed run, or damaged, is left out."""
    return rows_in(read_file(path)) if path.exists() else []


def last_row(path: Path) -> dict[str, Any]:
    """Return the last row of an optimizer step; empty where there is none. Reads the end of the file alone."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        rows = [row for row in rows_in(file.read()) if "loss" in row]
    return rows[-1] if rows else {}


def rows_in(content: bytes) -> list[dict[str, Any]]:
    """Return the rows in the content of a metrics file."""
    rows = []
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and all(isinstance(row.get(name), float | int) for name in ("step", loss_of(row))):
            rows.append(row)
    return rows


def loss_of(row: Mapping[str, Any]) -> str:
    """Return which loss a row has; `loss` where it has none."""
    return next((name for name in LOSSES if name in row), "loss")


def drop_rows_after(path: Path, step: int) -> None:
    """Drop the rows after a step, atomically. A file without such rows is not rewritten."""
    if path.is_symlink():
        raise EnvironmentNotReady(f"{path} is a link, which is not followed", "remove it")
    content = read_file(path) if path.exists() else b""
    kept = [row for row in rows_in(content) if row["step"] <= step]
    if len(kept) < content.count(b"\n") or content[-1:] not in (b"", b"\n"):
        write_file(path, "".join(json.dumps(row) + "\n" for row in kept).encode())


def plot_loss(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the loss by step: each value pale, and a running mean over it; and the held-out losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = curve_of(rows, "loss")
    if not len(steps):
        return
    window = window_of(len(steps))
    figure = Figure(figsize=(8, 4.5), dpi=110)
    axes = figure.add_axes((0.09, 0.12, 0.89, 0.8))  # `layout="constrained"` draws everything twice
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="each step")
    if len(steps) >= window:
        label = f"mean of {window:,} steps around each"
        axes.plot(steps, running_mean(losses, window), color="#08519c", linewidth=1.8, label=label)
    for name, (label, colour) in HELD_OUT_LINES.items():
        if measured := [(row["step"], row[name]) for row in rows if name in row]:
            axes.plot(*zip(*measured, strict=True), color=colour, marker="o", markersize=3.5, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss", title="Loss")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", edgecolor="none")  # "best" compares with every point
    content = BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    write_file(path, content.getvalue())


@contextmanager
def open_metrics(
    settings: Settings, step: int, world: World, open_trackers: OpenTrackers | None = None
) -> Iterator[Metrics | None]:
    """Open the files and trackers on rank 0, and close them however the run ends; None on other ranks."""
    if not world.is_first:
        yield None
        return
    metrics = Metrics(settings.training.output_dir, step, open_trackers)
    try:
        yield metrics
    finally:
        metrics.close()
