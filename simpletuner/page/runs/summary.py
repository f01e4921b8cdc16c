"""A run in a row of the list: its condition, steps, loss and time left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from simpletuner.page.runs.condition import Condition, State, find_condition
from simpletuner.page.runs.folder import FILES, RunFolder
from simpletuner.page.runs.log import Log
from simpletuner.status_line import format_seconds
from simpletuner.training.metrics_reader import METRICS, TAIL_BYTES, rows_in
from simpletuner.training.pace import DURATIONS, RECENT_STEPS, Durations, Pace
from simpletuner.training.settings_record import SETTINGS, read_settings


@dataclass(frozen=True)
class Summary:
    """What there is to say of a run in one line."""

    run: RunFolder
    condition: Condition
    step: int
    max_steps: int | None
    loss: float | None
    seconds_left: float | None
    model: str
    changed: str

    @property
    def time_left(self) -> str:
        is_known = self.condition.state is State.RUNNING and self.seconds_left is not None
        return format_seconds(self.seconds_left or 0.0) if is_known else ""


def summarize(run: RunFolder, log: Log, starting: bool) -> Summary:
    rows = [row for row in rows_in(run.tail(METRICS, TAIL_BYTES).encode()) if "loss" in row]
    settings = read_settings(path) if (path := run.file(SETTINGS)) is not None else None
    max_steps = log.max_steps or known_steps(settings)
    return Summary(
        run,
        find_condition(run, log, starting),
        step=int(rows[-1]["step"]) if rows else 0,
        max_steps=max_steps,
        loss=rows[-1]["loss"] if rows else None,
        seconds_left=estimate(run, rows, max_steps),
        model=" ".join(str((settings or {}).get(name) or "") for name in ("model_family", "model_flavour")).strip(),
        changed=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.written(*FILES))),
    )


def known_steps(settings: dict[str, Any] | None) -> int | None:
    """Return the steps that settings ask for; None where they count epochs."""
    steps = (settings or {}).get("max_train_steps")
    return steps if isinstance(steps, int) and steps > 0 else None


def estimate(run: RunFolder, rows: list[dict[str, Any]], max_steps: int | None) -> float | None:
    """Return the seconds that the rest takes, by its last steps; what is due between steps is left out."""
    if max_steps is None:
        return None
    pace = Pace(max_steps, {}, Durations(run.file(DURATIONS)))
    for row in rows[-RECENT_STEPS - 1 :]:
        if isinstance(seconds := row.get("seconds"), int | float):
            pace.add_step(float(seconds), 0.0)
    return pace.seconds_left(int(rows[-1]["step"])) if rows else None
