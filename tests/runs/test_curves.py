"""Curves: a running mean without lag, and few points without a lost peak."""

from __future__ import annotations

import numpy as np
import pytest

from simpletuner.runs.facts import describe_losses
from simpletuner.runs.metrics import MetricColumn, running_mean, thin_out, window_of


def test_a_running_mean_neither_lags_nor_bends_at_the_ends():
    ramp = np.linspace(9, 2, 400)
    assert running_mean(ramp, window_of(400)) == pytest.approx(ramp), "a straight line stays one, to its ends"
    noisy = ramp + np.random.default_rng(0).normal(0, 1, 400)
    assert np.abs(running_mean(noisy, 21) - ramp).mean() < 0.3
    by_hand = running_mean(np.array([4.0, 0.0, 8.0, 2.0]), 3)
    assert by_hand[1:3] == pytest.approx([4.0, 10 / 3]), "means of three around each"
    assert [window_of(points) for points in (1, 10, 100, 10_000)] == [3, 3, 5, 501]


def test_thinning_keeps_every_peak_and_the_order():
    steps, values = np.arange(100_000.0), np.random.default_rng(0).random(100_000)
    values[[12_345, 99_999]] = 50, -50
    few_steps, few = thin_out(steps, values, 600)
    assert len(few) <= 1200 and (np.diff(few_steps) > 0).all()
    assert few.max() == 50 and few.min() == -50
    assert np.array_equal(values[few_steps.astype(int)], few)


def test_first_and_last_losses_never_overlap():
    for losses, said in (
        ([3.0], "3.0000 at the only step"),
        ([3.0, 9.0, 1.0], "3.0000 at first, 1.0000 at last (one step each)"),
        ([4.0] * 15 + [2.0] * 15, "4.0000 at first, 2.0000 at last (means of 15 steps each)"),
        ([4.0] * 20 + [9.0] * 60 + [2.0] * 20, "4.0000 at first, 2.0000 at last (means of 20 steps each)"),
    ):
        column = MetricColumn()
        column.extend(range(len(losses)), losses)
        assert describe_losses(column) == said
