"""Alarms speak of rows that have their cause, once, and are silent about those of healthy runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simpletuner.runs.health.alarms import (
    GradientNorms,
    StepTimes,
    find_not_drawn,
    find_unchanged,
    find_without_gradient,
)
from simpletuner.runs.health.best_step import losses_in

Rows = Iterator[tuple[dict[str, Any], tuple[int, ...]]]


def rows(seed: int, steps: int = 1500, slow_from: int = 10**9, **changed: float) -> Rows:
    """Steps of a run: noisy, of two shapes, compiled and cached at first, with a norm that falls to a tenth."""
    rng = random.Random(seed)
    shapes = {(1, 16, 64, 64): 1.0, (1, 16, 96, 96): rng.uniform(1.5, 3)}
    second, wait = rng.uniform(0.05, 5), rng.uniform(0, 0.1)
    share = rng.random()
    for step in range(1, steps + 1):
        shape = rng.choices([*shapes], [share, 1 - share])[0]
        # One shape in each half of the run, as where a dataset of larger images begins to take part.
        if seed % 3 == 0:
            shape = [*shapes][step > steps / 2]
        seconds = second * shapes[shape] * rng.lognormvariate(0, 0.1) * (20 if step < 3 else 1)
        if rng.random() < 0.05:  # a checkpoint is written, or files are read from the disk
            seconds *= 3
        waited = wait * seconds
        norm = rng.lognormvariate(0, 0.5) * (0.1 + 0.9 * math.exp(-3 * step / steps))
        if step >= slow_from:
            seconds, norm = seconds * changed.get("seconds", 1), norm * changed.get("norm", 1)
            waited = changed.get("waited", wait) * seconds
        yield {"step": step, "seconds": seconds, "data_seconds": waited, "grad_norm": norm}, shape


def alarms_of(check: Any, given: Rows) -> list[tuple[int, str]]:
    return [(row["step"], alarm.sentence) for row, shape in given if (alarm := check.add(row, shape)) is not None]


def test_twenty_healthy_runs_set_off_no_alarm():
    for seed in range(20):
        for check in (StepTimes(), GradientNorms()):
            assert alarms_of(check, rows(seed)) == [], seed


def test_real_runs_set_off_no_alarm():
    """Rows of 20 runs of tiny models of 11 families, 350 to 600 steps each, on two cores beside other work."""
    lines = (Path(__file__).parents[2] / "fixtures" / "healthy_runs.jsonl").read_text().splitlines()
    assert len(lines) == 20
    for run in map(json.loads, lines):
        columns = [run[name] for name in ("seconds", "data_seconds", "grad_norm")]
        taken = [
            {"step": step, "seconds": seconds, "data_seconds": waited, "grad_norm": norm}
            for step, (seconds, waited, norm) in enumerate(zip(*columns, strict=True), start=1)
        ]
        for check in (StepTimes(), GradientNorms()):
            assert alarms_of(check, ((row, ()) for row in taken)) == [], run["run"]
        slower = [row | {"seconds": 2 * row["seconds"]} if row["step"] > 200 else row for row in taken]
        assert alarms_of(StepTimes(), ((row, ()) for row in slower)), "the same run on half a machine"


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_become_slower_are_said_with_what_they_wait_for(seed):
    found = alarms_of(StepTimes(), rows(seed, 1500, slow_from=1000, seconds=2.0))
    assert found and 1000 < found[0][0] <= 1100
    assert "times as long as before" in found[0][1] and "waiting for data" not in found[0][1]
    said = alarms_of(StepTimes(), rows(seed, 1500, slow_from=1000, seconds=2.0, waited=0.6))[-1][1]
    assert "waiting for data takes 60% of the time, before " in said
    assert alarms_of(StepTimes(), rows(seed, 1500, slow_from=1000, seconds=1.3)) == []


@pytest.mark.parametrize(("factor", "what"), [(1e-6, "vanish"), (0.0, "vanish"), (1e4, "explode")])
def test_gradients_that_vanish_or_explode_are_said_within_40_steps(factor, what):
    for seed in range(6):
        step, said = alarms_of(GradientNorms(), rows(seed, 1500, slow_from=700, norm=factor))[0]
        assert 700 < step <= 740 and said.startswith(f"gradients {what}: the norm before clipping is ")
    # The loss is exactly 0 from the start, as where all masks are black.
    assert alarms_of(GradientNorms(), rows(1, 1500, slow_from=0, norm=0.0))[0][0] == 20


def measured(*losses: float, every: int = 50, spread: float = 0.0):
    rng = random.Random(1)
    for number, loss in enumerate(losses):
        parts = [each + loss + spread * rng.uniform(-1, 1) for each in (0.1, 0.5, 0.9)]
        row = {"step": number * every, "eval_loss": sum(parts) / 3, "eval_loss_parts": parts}
        yield from losses_in(json.loads(json.dumps(row)))


def test_a_loss_that_is_the_base_models_is_said_after_a_tenth_of_the_run():
    same = [*measured(0.5, 0.5, 0.5)]
    assert find_unchanged(same[:2], max_steps=1000) is None, "a tenth is 100 steps"
    alarm = find_unchanged(same, max_steps=1000)
    assert alarm is not None and alarm.sentence.startswith(
        "after 100 steps the held-out loss is still the base model's (1.0000)"
    )
    assert find_unchanged([*measured(0.5, 0.5, every=5)], 20) is None, "a run of 20 steps may have changed nothing yet"
    assert find_unchanged([*measured(0.5, 0.5, spread=0.05)], 100) is None, "the mean alone is equal"
    assert find_unchanged([*measured(0.5, 0.49)], 100) is None and find_unchanged([], 100) is None
    assert find_unchanged([*measured(0.5, 0.5)][1:], 100) is None, "the base model was not measured"


def test_images_that_are_never_drawn_and_weights_without_gradients_are_counted():
    assert find_not_drawn(1000, 10, 100) is None and find_without_gradient([], 10, 5) is None
    assert find_not_drawn(1000, 8, 99) is None, "a trial of a few steps is not said to lack images"
    alarm = find_not_drawn(1000, 8, 100)
    assert (
        alarm is not None
        and alarm.sentence == "at least 200 images of 1,000 will never be drawn: this run takes 800 samples"
    )
    alarm = find_without_gradient(["a", "b", "c", "d"], 10, 5)
    assert (
        alarm is not None and alarm.sentence == "4 of 10 trained weights had no gradient in 5 steps: a, b, c and 1 more"
    )
