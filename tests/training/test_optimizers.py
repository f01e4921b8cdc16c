from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from simpletuner.settings.sections import Optimizer
from simpletuner.training.optimizers import LearningRate, make_optimizer
from simpletuner.training.schedule import Schedule

MAX_STEPS = 14


def rates(steps: list[int], **values) -> list[float]:
    settings = Optimizer(learning_rate=1.0, **values)
    return [LearningRate(Schedule(MAX_STEPS), settings).at(step) for step in steps]


def test_a_constant_rate_stays():
    assert rates([0, 1, 13, 100], lr_scheduler="constant") == [1.0] * 4


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup", "linear", "cosine", "polynomial"])
def test_the_rate_rises_in_equal_steps_and_reaches_its_peak_right_after_the_warm_up(schedule):
    warming = rates([0, 1, 2, 3, 4], lr_scheduler=schedule, lr_warmup_steps=4)
    assert warming == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"lr_scheduler": "constant_with_warmup"}, [1.0, 1.0, 1.0, 1.0]),
        ({"lr_scheduler": "linear"}, [1.0, 0.75, 0.5, 0.0]),
        ({"lr_scheduler": "linear", "lr_end": 0.2}, [1.0, 0.8, 0.6, 0.2]),
        ({"lr_scheduler": "cosine"}, [1.0, 0.5 + math.sqrt(2) / 4, 0.5, 0.0]),
        ({"lr_scheduler": "cosine", "lr_end": 0.5}, [1.0, 0.75 + math.sqrt(2) / 8, 0.75, 0.5]),
        ({"lr_scheduler": "polynomial"}, [1.0, 0.75, 0.5, 0.0]),
        ({"lr_scheduler": "polynomial", "lr_power": 2.0}, [1.0, 0.5625, 0.25, 0.0]),
        ({"lr_scheduler": "polynomial", "lr_power": 2.0, "lr_end": 0.2}, [1.0, 0.65, 0.4, 0.2]),
    ],
)
def test_each_schedule_at_its_start_quarter_half_and_end(values, wanted):
    settings = Optimizer(learning_rate=1.0, lr_warmup_steps=4, **values)
    assert [LearningRate(Schedule(12), settings).at(4 + done) for done in (0, 2, 4, 8)] == pytest.approx(wanted)


def test_beyond_the_end_the_rate_stays_at_its_end():
    assert rates([14, 15, 1000], lr_scheduler="linear", lr_end=0.1) == pytest.approx([0.1] * 3)


def test_a_warm_up_as_long_as_the_run_never_divides_by_zero():
    assert rates([13, 14], lr_scheduler="cosine", lr_warmup_steps=14) == pytest.approx([14 / 15, 1.0])


@given(
    st.sampled_from(["constant", "constant_with_warmup", "linear", "cosine", "polynomial"]),
    st.integers(0, 20),
    st.integers(1, 40),
)
@hypothesis_settings(deadline=None)
def test_after_the_warm_up_the_rate_never_rises_and_never_leaves_its_bounds(schedule, warm_up, more):
    settings = Optimizer(learning_rate=3e-4, lr_end=1e-5, lr_scheduler=schedule, lr_warmup_steps=warm_up)
    values = [LearningRate(Schedule(warm_up + more), settings).at(step) for step in range(warm_up + more + 3)]
    assert all(0 < value <= 3e-4 for value in values)
    assert values[: warm_up + 1] == sorted(values[: warm_up + 1])
    assert values[warm_up:] == sorted(values[warm_up:], reverse=True)


GRADIENTS = [torch.tensor([3.0, -0.5]), torch.tensor([-1.0, -2.0])]
BETAS = {"adam_beta1": 0.8, "adam_beta2": 0.95}
SETTINGS = {"learning_rate": 0.1, **BETAS, "adam_epsilon": 1e-6, "adam_weight_decay": 0.5}


def trained(name: str) -> Tensor:
    """Return what two steps make of two weights."""
    weights = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    unused = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer([weights, unused], Optimizer(optimizer=name, **SETTINGS))  # pyright: ignore[reportArgumentType]
    for gradient in GRADIENTS:
        weights.grad = gradient.clone()
        optimizer.step()
    assert unused.item() == 1.0
    return weights.detach()


def test_adam_puts_weight_decay_into_the_gradient():
    weights, mean, square = torch.tensor([2.0, -1.0]), torch.zeros(2), torch.zeros(2)
    for step, gradient in enumerate(GRADIENTS, start=1):
        gradient = gradient + 0.5 * weights
        mean, square = 0.8 * mean + 0.2 * gradient, 0.95 * square + 0.05 * gradient**2
        weights = weights - 0.1 * (mean / (1 - 0.8**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-6)
    torch.testing.assert_close(trained("adam"), weights)


def test_adagrad_divides_by_all_gradients_so_far():
    weights, total = torch.tensor([2.0, -1.0]), torch.zeros(2)
    for gradient in GRADIENTS:
        gradient = gradient + 0.5 * weights
        total = total + gradient**2
        weights = weights - 0.1 * gradient / (total.sqrt() + 1e-6)
    torch.testing.assert_close(trained("adagrad"), weights)


def test_lion_steps_by_the_sign_of_the_mean_and_the_gradient():
    weights, mean = torch.tensor([2.0, -1.0]), torch.zeros(2)
    for gradient in GRADIENTS:
        weights = weights - 0.1 * ((0.8 * mean + 0.2 * gradient).sign() + 0.5 * weights)
        mean = 0.95 * mean + 0.05 * gradient
    torch.testing.assert_close(trained("lion"), weights)


def test_the_optimizer_is_adamw_as_the_settings_say():
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    settings = Optimizer(learning_rate=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, adam_weight_decay=0.5)
    optimizer = make_optimizer([parameter], settings)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.95), 1e-6, 0.5)
    parameter.grad = torch.tensor([3.0])
    optimizer.step()
    # decay: 2 - 0.1 * 0.5 * 2 = 1.9; the first step of Adam is the learning rate times the sign of the gradient
    torch.testing.assert_close(parameter.detach(), torch.tensor([1.8]), atol=1e-5, rtol=0)
