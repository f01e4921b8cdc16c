"""Start, training time and energy of a run, over all of its starts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner.errors import SimpleTunerError
from simpletuner.status_line import format_seconds
from simpletuner.system.files.regular_files import read_file
from simpletuner.system.numbers import count_noun
from simpletuner.training.metrics.metrics_reader import MetricColumns, parse_lines
from simpletuner.training.run_folder.settings_record import HISTORY

TIME = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True)
class Start:
    """A start of a run: when it began to train, after which step, on how many GPUs with which power limit each."""

    time: datetime
    step: int
    gpus: int = 0
    watts: float = 0.0
    """0 where it is not known."""
    data: str = ""
    """Key of the listing of its data; empty where it has none."""


def read_starts(output: Path) -> list[Start]:
    """Return the starts of a run in their order, from the one that began it; those of a version that wrote none are
    not known."""
    try:
        rows = parse_lines(read_file(output / HISTORY).splitlines())
    except (OSError, SimpleTunerError):
        return []
    starts = [start for row in rows for start in parse_start(row)]
    begun = max((number for number, start in enumerate(starts) if start.step == 0), default=0)
    return starts[begun:]


def parse_start(row: Any) -> list[Start]:
    try:
        time = datetime.fromisoformat(row["time"]).astimezone(UTC)
        numbers = int(row["step"]), int(row.get("gpus", 0)), float(row.get("gpu_watts", 0))
        return [Start(time, *numbers, str(row.get("data", "")))]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return []


def describe_times(starts: Sequence[Start], columns: MetricColumns) -> list[tuple[str, str]]:
    """Return when a run began, and how long its steps took, as names and values."""
    rows = []
    if starts:
        again = f"; {count_noun(len(starts), 'start')}, the last {starts[-1].time:{TIME}}" if len(starts) > 1 else ""
        rows.append(("started", f"{starts[0].time:{TIME}}{again}"))
    if len(seconds := columns.finite("seconds")[1]):
        rows.append(("trained for", f"{format_seconds(seconds.sum())} in {count_noun(len(seconds), 'step')}"))
    return rows


def describe_energy(starts: Sequence[Start], columns: MetricColumns) -> str:
    """Return an upper bound of what the GPUs took for the steps: seconds x power limit, by the start that took each.

    A board takes no more than its limit on average, so less is what was used; the machine around it is not in it.
    """
    steps, seconds = columns.finite("seconds")
    watts = np.zeros(len(steps))
    for start in starts:  # a later one has taken again what follows its checkpoint
        watts[steps > start.step] = start.gpus * start.watts
    if not len(steps) or not watts.all():
        return "not estimated: no power limit of a GPU is known for all steps"
    kilowatt_hours = float((watts * seconds).sum()) / 3.6e6
    gpus = " and ".join(dict.fromkeys(f"{count_noun(each.gpus, 'GPU')} of {each.watts:g} W" for each in starts))
    return (
        f"at most {kilowatt_hours:.3g} kWh (estimate: seconds of all steps x GPUs x power limit; {gpus}), "
        "without encoding, validation and the machines around the GPUs"
    )
