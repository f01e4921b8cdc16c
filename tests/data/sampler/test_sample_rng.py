from __future__ import annotations

import numpy as np
import pytest

from simpletuner.data.sampler.epoch_order import SampleNoise, sample_noise

SHAPE = (4, 8, 8)
GOLDEN = [0.02060933676521781, 0.07824666393909274, 0.13923594317151666, 1.2081050872802734, 0.37164464592933655]


def same(one: SampleNoise, two: SampleNoise) -> bool:
    numbers = (one.u, one.caption, one.dropout) == (two.u, two.caption, two.dropout)
    return numbers and np.array_equal(one.noise, two.noise)


def test_a_draw_repeats_itself():
    assert same(sample_noise(1, "d/a.png", 5, 0, SHAPE), sample_noise(1, "d/a.png", 5, 0, SHAPE))


@pytest.mark.parametrize(
    "other", [(2, "d/a.png", 5, 0), (1, "d/b.png", 5, 0), (1, "d/a.png", 6, 0), (1, "d/a.png", 5, 1)]
)
def test_seed_sample_step_and_occurrence_each_change_every_number(other):
    one, two = sample_noise(1, "d/a.png", 5, 0, SHAPE), sample_noise(*other, SHAPE)
    assert one.u != two.u
    assert one.caption != two.caption
    assert one.dropout != two.dropout
    assert not np.isclose(one.noise, two.noise).any() or np.isclose(one.noise, two.noise).mean() < 0.02


def test_the_uniform_numbers_do_not_depend_on_the_shape_of_the_latents():
    one, two = sample_noise(1, "a", 0, 0, (4, 8, 8)), sample_noise(1, "a", 0, 0, (16, 4, 6))
    assert (one.u, one.caption, one.dropout) == (two.u, two.caption, two.dropout)
    assert two.noise.shape == (16, 4, 6)


def test_noise_is_standard_normal_in_float32():
    noise = np.stack([sample_noise(0, f"d/{number}", 0, 0, SHAPE).noise for number in range(400)])
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert abs((np.abs(noise) < 1).mean() - 0.6827) < 0.01
    neighbours = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(neighbours) < 0.02


def test_uniform_numbers_fill_zero_to_one_and_do_not_depend_on_each_other():
    draws = [sample_noise(0, "d/a", step, 0, (1,)) for step in range(4000)]
    numbers = np.array([(each.u, each.caption, each.dropout) for each in draws])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    np.testing.assert_allclose(numbers.mean(0), 0.5, atol=0.02)
    np.testing.assert_allclose(numbers.var(0), 1 / 12, atol=0.005)
    assert np.abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.06


def test_a_draw_is_the_same_on_every_machine_and_in_every_version():
    drawn = sample_noise(42, "d/a.png", 7, 1, (2,))
    numbers = [drawn.u, drawn.caption, drawn.dropout, *drawn.noise.tolist()]
    np.testing.assert_allclose(numbers, GOLDEN, rtol=1e-6)
