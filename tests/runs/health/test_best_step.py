"""The best step by the held-out loss: not by chance, whatever the file and the folder have been through."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoint_states import save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner.checkpoints.layout import prune_checkpoints, steps_to_prune
from simpletuner.runs.facts import describe_result
from simpletuner.runs.health.best_step import (
    Measured,
    best_saved,
    best_saved_of,
    find_best,
    find_best_of,
    losses_in,
    read_measured,
)
from simpletuner.runs.metrics import METRICS, read_columns
from simpletuner.runs.report import comparison_facts, render_comparison
from simpletuner.training.metrics.metrics import Metrics

OF_IMAGES = [0.2, 0.9, 0.4, 1.6, 0.7, 0.5, 1.1, 0.3]
"""Losses of single images differ by more than training changes them."""


def row(step: int, loss: float, noise: float = 0.0, **more: Any) -> dict[str, Any]:
    """A row as a run writes it, with the losses of eight images, each of which is off by up to `noise`."""
    rng = random.Random(step)
    parts = [each + loss + noise * rng.uniform(-1, 1) for each in OF_IMAGES]
    return {"step": step, "eval_loss": sum(parts) / len(parts), "eval_loss_parts": parts, "eval_set": "a", **more}


def write(output: Path, rows: list[dict[str, Any]]) -> Path:
    steps = [{"step": step, "loss": 1.0, "seconds": 1.0} for step in range(1, max(each["step"] for each in rows) + 1)]
    lines = sorted([*steps, *rows], key=lambda each: each["step"])
    (output / METRICS).write_text("".join(json.dumps(each) + "\n" for each in lines))
    return output


def test_a_step_is_better_by_more_than_the_spread_of_its_images(tmp_path):
    """Between images losses differ by 0.5; a loss that is lower by 0.01 for each of them is better nevertheless."""
    falling = [row(step, -0.0001 * step, noise=0.001) for step in range(0, 500, 100)]
    found = find_best_of(write(tmp_path, falling))
    assert found is not None and found.best.step == 400 and not found.since
    by_chance = [row(0, 0), *(row(step, -0.001, noise=0.05) for step in range(100, 500, 100))]
    found = find_best_of(write(tmp_path, by_chance))
    assert min(by_chance, key=lambda each: each["eval_loss"])["step"] != 0
    assert found is not None and found.best.step == 0 and found.above == 0
    assert found.describe().startswith("the base model, before the first step: 0.7125; step 400 does not differ (")


def test_a_rise_is_said_after_three_evaluations_in_a_row(tmp_path):
    levels = {f"eval_loss_noise_{number}of2": 0.4 for number in (1, 2)}
    rows = [row(0, 0.0), row(100, -0.2, **levels)]
    risen = [
        row(step, -0.2 + 0.0001 * step, 0.001, eval_loss_noise_1of2=0.6, eval_loss_noise_2of2=0.4)
        for step in (200, 300, 400)
    ]
    for count, says in enumerate((False, False, True), start=1):
        found = find_best_of(write(tmp_path, [*rows, *risen[:count]]))
        assert found is not None and found.best.step == 100
        assert (found.above, found.has_risen) == (count, says)
    assert found.describe().startswith("step 100: 0.5125; at step 400 it is higher by 0.0")
    assert found.describe().endswith("as in 3 evaluations in a row") and " ± 0.000" in found.describe()
    assert found.most_overfitted() == "at the least noise (+50%)"
    found = find_best_of(write(tmp_path, [*rows, *risen[:2], row(350, -0.2, 0.02), *risen[2:]]))
    assert found is not None and found.above == 1, "one that does not differ begins again"


def test_average_and_trained_weights_are_compared_and_what_follows_is_of_the_same(tmp_path):
    rows = [row(step, -0.1 * number) for number, step in enumerate((0, 100, 200))]
    for each, lower in zip(rows, (0.0, 0.0, 0.05), strict=True):
        each["eval_loss_ema"] = each["eval_loss"] - lower
        each["eval_loss_ema_parts"] = [part - lower for part in each["eval_loss_parts"]]
    found = find_best_of(write(tmp_path, rows))
    assert found is not None and (found.best.step, found.best.weights, found.since) == (200, "ema", [])
    assert found.describe() == "step 200: 0.4625 of the EMA"
    assert describe_result(read_columns(tmp_path / METRICS))[-1] == ("best step", "step 200: 0.4625 of the EMA")
    del rows[-1]["eval_loss"]
    assert find_best_of(write(tmp_path, rows)) == found, "with ema_validation=ema_only it is measured alone"


DAMAGED = [
    b'{"step": 100, "eval_loss": NaN}',
    b'{"step": 100, "eval_loss": Infinity, "eval_loss_parts": [NaN, 1.0], "eval_set": "a"}',
    b'{"step": 100, "eval_loss": -Infinity, "eval_set": "a"}',
    b'{"step": 100, "eval_loss": 0.01, "eval_lo',
    b'{"step": "100", "eval_loss": 0.01, "eval_set": "a"}',
    b'{"step": 100, "eval_loss": "0.01", "eval_set": "a"}',
    b'{"step": 100, "eval_loss": true, "eval_set": "a"}',
    b'{"step": 100, "eval_loss": [0.01], "eval_set": "a"}',
    b'[{"step": 100, "eval_loss": 0.01, "eval_set": "a"}]',
    b'\xff\x00"eval_loss": 0.01}',
    b"[" * 100_000 + b'"eval_loss',
]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_no_best_step_and_hides_none(tmp_path, line):
    write(tmp_path, [row(0, 0.0), row(200, -0.1)])
    first, *rest = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    (tmp_path / METRICS).write_bytes(b"".join([first, line + b"\n", *rest]))
    assert [each.step for each in read_measured(tmp_path)] == [0, 200]
    assert find_best_of(tmp_path).best.step == 200
    (tmp_path / METRICS).write_bytes(first + line)  # cut within a row
    assert find_best_of(tmp_path).best.step == 0
    (tmp_path / METRICS).write_bytes(line + b"\n")
    assert find_best_of(tmp_path) is None and best_saved_of(tmp_path, [100]) is None


@pytest.mark.parametrize(
    "parts", [None, 3, "12345678", [], [1.0], [1, "2"], [float("nan")] * 8, {"0": 1}, [10**400] * 8]
)
def test_parts_of_another_form_leave_the_loss(tmp_path, parts):
    write(tmp_path, [row(0, 0.0), row(100, -0.1, eval_loss_parts=parts)])
    found = find_best_of(tmp_path)
    assert found is not None and found.best.step == 100, "the spread is not known: a lower loss is better"


def test_losses_of_other_images_are_not_compared(tmp_path):
    assert find_best_of(tmp_path) is None, "there is no file"
    (tmp_path / METRICS).mkdir()
    assert find_best_of(tmp_path) is None
    (tmp_path / METRICS).rmdir()
    rows = [row(0, 0.0), row(100, -0.5), row(200, 0.3, eval_set="b"), row(300, 0.2, eval_set="b")]
    assert find_best_of(write(tmp_path, rows)).best.step == 300
    earlier = [{"step": step, "eval_loss": loss} for step, loss in ((0, 0.3), (100, 0.1), (200, 0.2))]
    assert find_best_of(write(tmp_path, earlier)).best.step == 100, "rows of earlier versions have no digest"


def test_the_best_checkpoint_is_kept_whatever_the_limit_and_a_run_that_goes_back_forgets_later_ones(tmp_path):
    losses = {10: -0.1, 20: -0.3, 30: -0.2, 40: -0.1, 50: 0.1}
    for step in losses:
        save_checkpoint(tmp_path, step)
        write(tmp_path, [row(0, 0.0), *(row(each, losses[each]) for each in losses if each < step)])
        prune_checkpoints(tmp_path / "checkpoints", 1, choose_best=lambda steps: best_saved_of(tmp_path, steps))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint-000020",
        "checkpoint-000050",
    ]
    facts = comparison_facts({"one": tmp_path, "two": tmp_path})["runs"]["one"]
    assert (facts["best_step"], facts["best_eval_loss"]) == (20, pytest.approx(0.4125))
    assert '<th scope="row">one</th><td>step 20: 0.4125' in render_comparison(
        {"one": tmp_path, "two": tmp_path}, tmp_path
    )

    write(tmp_path, [row(0, 0.0), *(row(each, losses[each]) for each in losses)])
    Metrics(tmp_path, 10).close()  # the run goes on from step 10, or was killed while it saved step 20
    assert find_best_of(tmp_path).best.step == 10
    Metrics(tmp_path, 0).close()
    assert find_best_of(tmp_path) is None


@settings(max_examples=200)
@given(st.lists(st.floats(0.1, 1), min_size=1, max_size=12), st.integers(1, 3), st.data())
def test_pruning_step_by_step_keeps_what_a_look_at_all_would_choose(losses, keep, data):
    """What was removed before must not change which of the rest is the best."""
    spread = data.draw(st.floats(0, 0.2))
    rows = [row(step, loss, spread) for step, loss in enumerate(losses)]
    saved = [step for step in range(1, len(rows)) if data.draw(st.booleans())]
    kept: list[int] = []
    for step in saved:
        known = list(measured_in(rows[:step]))  # that of the step itself is measured after it is saved
        kept = [step, *kept]
        gone = steps_to_prune(kept, keep, lambda steps, known=known: step_of(best_saved(known, steps)))
        kept = [each for each in kept if each not in gone]
        assert kept[:keep] == [each for each in reversed(saved) if each <= step][:keep]
        assert len(kept) <= keep + 1
    known = list(measured_in(rows))
    best = find_best(known).best
    if best.step in saved:
        assert step_of(best_saved(known, kept)) == best.step
    elif kept:
        assert best_saved(known, kept).loss == min(each.loss for each in known if each.step in kept)


def measured_in(rows):
    return (each for one in rows for each in losses_in(one))


def step_of(measured) -> int | None:
    return measured.step if measured is not None else None


def test_two_held_out_images_show_less_than_sixteen():
    """Differences of equal mean and deviation: of two images they may well be chance."""
    differences = {2: [0.01, 0.05], 16: [0.01, 0.05] * 8}
    for count, found in differences.items():
        before = Measured(0, "eval_loss", 1.0, (1.0,) * count)
        after = Measured(100, "eval_loss", 0.97, tuple(1 - each for each in found))
        assert after.is_below(before) == (count == 16)
    assert after.difference_to(before) == "0.0300 ± 0.0110"
