from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from simpletuner.runs.charts import CURVE, tick_values
from simpletuner.runs.metrics import METRICS, rows_in
from simpletuner.training.metrics.metrics import Metrics


def row(step: int, loss: float = 0.5) -> dict:
    return {"step": step, "loss": loss, "learning_rate": 1e-5}


def run_of(folder: Path, steps: range, after: int) -> None:
    """Write the metrics of a run that goes on after a step."""
    metrics = Metrics(folder, after)
    for step in steps:
        metrics.write(row(step, 1 / step))
    metrics.close()


def steps_in(folder: Path) -> list[int]:
    return [each["step"] for each in rows_in((folder / METRICS).read_bytes())]


def test_there_is_one_json_object_per_step_as_soon_as_it_is_written(tmp_path):
    metrics = Metrics(tmp_path, 0)
    metrics.write(row(1, 0.25))
    assert rows_in((tmp_path / METRICS).read_bytes()) == [row(1, 0.25)]
    metrics.write(row(2))
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2]
    metrics.close()


def test_a_run_that_begins_again_has_no_row_of_the_start_before(tmp_path):
    for _ in range(2):  # the first is killed before its first checkpoint
        metrics = Metrics(tmp_path, 0)
        metrics.write({"step": 0, "eval_loss": 0.5}, "eval")
        metrics.write(row(1))
        metrics.close()
    assert rows_in((tmp_path / METRICS).read_bytes()) == [{"step": 0, "eval_loss": 0.5}, row(1)]
    run_of(tmp_path, range(2, 3), after=1)
    assert steps_in(tmp_path) == [0, 1, 2], "a run that resumes keeps the loss before the first step"


def test_a_resumed_run_forgets_the_steps_after_its_checkpoint(tmp_path):
    run_of(tmp_path, range(1, 10), after=0)
    run_of(tmp_path, range(5, 7), after=4)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_run_from_the_beginning_starts_a_new_file(tmp_path):
    run_of(tmp_path, range(1, 10), after=0)
    run_of(tmp_path, range(1, 3), after=0)
    assert steps_in(tmp_path) == [1, 2]


def test_a_torn_last_line_is_left_out_wherever_it_is_torn(tmp_path):
    run_of(tmp_path, range(1, 4), after=0)
    path = tmp_path / METRICS
    whole = path.read_text()
    last = whole[:-1].rindex("\n") + 1
    for length in range(last, len(whole) - 1):
        path.write_text(whole[:length])
        assert steps_in(tmp_path) == [1, 2]
    path.write_text(whole[: last + 5])
    run_of(tmp_path, range(3, 5), after=2)
    assert steps_in(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("steps", [3, 4, 200])
def test_the_loss_curve_is_a_real_picture_with_both_lines(tmp_path, steps):
    run_of(tmp_path, range(1, steps + 1), after=0)
    with Image.open(tmp_path / CURVE) as picture:
        assert picture.format == "PNG"
        assert picture.width >= 600
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for colour in ((0x9E, 0xCA, 0xE1), (0x08, 0x51, 0x9C)):
        assert (np.abs(pixels - np.array(colour)).max(1) < 8).any(), colour


def test_closing_draws_the_curve_and_nothing_is_drawn_of_nothing(tmp_path):
    run_of(tmp_path, range(0), after=0)
    assert not (tmp_path / CURVE).exists()
    run_of(tmp_path, range(1, 4), after=0)
    with Image.open(tmp_path / CURVE) as picture:
        picture.verify()


def test_a_loss_that_is_not_a_number_does_not_stop_the_curve(tmp_path):
    metrics = Metrics(tmp_path, 0)
    for step, loss in enumerate([0.5, float("nan"), float("inf"), 0.4], start=1):
        metrics.write(row(step, loss))
    metrics.close()
    assert (tmp_path / CURVE).exists()


@pytest.mark.parametrize("name", ["eval_loss", "eval_loss_ema"])
def test_the_held_out_losses_are_in_the_picture(tmp_path, name):
    metrics = Metrics(tmp_path, 0)
    for step in range(1, 10):
        metrics.write(row(step, 1 / step))
        metrics.write({"step": step, name: 0.5 + 1 / step}, "eval")
    metrics.close()
    colour = {"eval_loss": (0xD9, 0x48, 0x01), "eval_loss_ema": (0x23, 0x8B, 0x45)}[name]
    with Image.open(tmp_path / CURVE) as picture:
        assert (np.asarray(picture)[60:400] == colour).all(-1).sum() > 100


@given(low=st.floats(-1e6, 1e6), height=st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_cover_the_values(low, height):
    values = tick_values(low, high := low + height)
    apart = np.diff(values)
    assert apart == pytest.approx(apart[0], rel=1e-3) and 2 <= len(values) <= 6
    rounding = 1e-9 * apart[0] + 1e-15 * max(abs(low), abs(high))
    assert values[0] <= low + rounding and values[-1] >= high - rounding


def test_a_run_ends_without_loading_matplotlib(tmp_path):
    script = "import sys; from pathlib import Path; from simpletuner.training.metrics.metrics import Metrics\n"
    script += "run = Metrics(Path(sys.argv[1]), 0); run.write({'step': 1, 'loss': 0.5}); run.close()\n"
    script += "import simpletuner.runs.report; print('matplotlib' in sys.modules)"
    ended = subprocess.run([sys.executable, "-P", "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n" and (tmp_path / CURVE).exists()
