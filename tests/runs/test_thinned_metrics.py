"""A million steps in a few thousand points: nothing that can be seen is lost, and one more step is one more step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from simpletuner.runs.metrics import (
    ENDS,
    MAX_BLOCKS,
    METRICS,
    MetricColumn,
    MetricColumns,
    read_columns,
    running_mean,
    window_of,
)


def test_few_points_are_kept_as_they_are(tmp_path: Path):
    losses = [3.0, 1.0, float("nan"), 2.0, *np.random.default_rng(0).random(500).tolist()]
    rows = (json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, start=1))
    (tmp_path / METRICS).write_text("".join(rows))
    columns = read_columns(tmp_path / METRICS)
    steps, values = columns.finite("loss")
    assert steps.tolist() == [1, 2, *range(4, 505)] and values.tolist() == [3.0, 1.0, *losses[3:]]
    window, means = columns.smoothed("loss", 0.05)
    assert window == window_of(503) and means == pytest.approx(running_mean(values, window))
    assert [len(each) for each in columns.finite("missing")] == [0, 0]


@pytest.mark.parametrize("pieces", [[100_001], [1] * 3000 + [97_001], [MAX_BLOCKS, 1, MAX_BLOCKS - 1, 91_808, 1]])
def test_peaks_ends_and_means_of_many_points_are_kept(pieces: list[int]):
    count = sum(pieces)
    steps = np.arange(1.0, count + 1)
    values = np.sin(steps / 9000) + np.random.default_rng(0).normal(0, 0.1, count)
    values[[7, 54_321, 99_990]] = 50, -50, 40
    column, columns = MetricColumn(), MetricColumns(Path("nowhere"))
    for start, size in zip(np.cumsum([0, *pieces]), pieces, strict=False):
        column.extend(steps[start : start + size].tolist(), values[start : start + size].tolist())
    columns.columns["loss"] = column
    shown, drawn = columns.finite("loss")
    assert len(shown) <= 2 * MAX_BLOCKS + 3 and (np.diff(shown) > 0).all()
    assert np.array_equal(values[shown.astype(int) - 1], drawn)
    assert {50.0, -50.0, 40.0, values[-1]} <= set(drawn.tolist()) and shown[-1] == count
    window, means = columns.smoothed("loss", 0.05)
    assert window == 5001
    inner = (shown > 6000) & (shown < count - 6000)
    assert np.abs(means[inner] - np.sin(shown[inner] / 9000)).max() < 0.05
    assert column.first.tolist() == values[:ENDS].tolist() and column.last.tolist() == values[-ENDS:].tolist()
    _, kept, counts = column.means()
    assert (kept @ counts, counts.sum()) == pytest.approx((values.sum(), count))
