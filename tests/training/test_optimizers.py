from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from simpletuner.parallel.optimizers.schedule_free import ScheduleFreeAdamW
from simpletuner.parallel.torch_engine import ShardedParameter, sharded_parameters
from simpletuner.settings.declared.sections import Optimizer
from simpletuner.training.optimizers import LearningRate, Schedule, make_optimizer

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


def test_a_warm_up_may_be_a_fraction_of_the_run():
    steps = LearningRate(Schedule(80), Optimizer(learning_rate=1.0, lr_scheduler="cosine", lr_warmup_steps=4))
    share = LearningRate(Schedule(80), Optimizer(learning_rate=1.0, lr_scheduler="cosine", lr_warmup_steps=0.05))
    assert [share.at(step) for step in range(81)] == [steps.at(step) for step in range(81)]
    assert LearningRate(Schedule(9), share.settings).at(0) == 1.0, "of a run of nine steps 5 % is none"


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


def named(*parameters: torch.nn.Parameter) -> dict[str, ShardedParameter]:
    return sharded_parameters((str(number), each) for number, each in enumerate(parameters))


def trained(name: str) -> Tensor:
    """Return what two steps make of two weights."""
    weights = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    unused = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer(named(weights, unused), Optimizer(optimizer=name, **SETTINGS))  # pyright: ignore[reportArgumentType]
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


def test_prodigy_multiplies_the_rate_by_the_distance_that_it_estimates():
    start = weights = torch.tensor([2.0, -1.0])
    mean, square, slope = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    distance, numerator, decay = 1e-6, 0.0, math.sqrt(0.95)
    for gradient in GRADIENTS:
        share = (1 - decay) * 0.1 * distance**2
        slope = decay * slope + share * gradient
        numerator = decay * numerator + share * float(gradient @ (start - weights))
        mean = 0.8 * mean + 0.2 * distance * gradient
        square = 0.95 * square + 0.05 * (distance * gradient) ** 2
        weights = weights * (1 - 0.1 * distance * 0.5)
        weights = weights - 0.1 * distance * mean / (square.sqrt() + distance * 1e-6)
        distance = max(distance, numerator / float(slope.abs().sum()))
    torch.testing.assert_close(trained("prodigy"), weights, atol=0, rtol=1e-7)


def test_prodigy_decays_weights_while_its_distance_is_small():
    """T108: 1 - d x lr x decay was rounded to 1 in float32 as long as the product is below 3e-8."""
    means = []
    for decay in (0.0, 0.01):
        start = 1 + torch.rand(20_000, generator=torch.Generator().manual_seed(1))
        weights, noise = torch.nn.Parameter(start.clone()), torch.Generator().manual_seed(2)
        optimizer = make_optimizer(named(weights), Optimizer(optimizer="prodigy", adam_weight_decay=decay))
        for _ in range(100):  # gradients without a direction leave the distance at 1e-6
            weights.grad = torch.randn(20_000, generator=noise)
            optimizer.step()
        assert optimizer.state[weights]["distance"] < 2e-6
        means.append(weights.detach().double().mean().item())
    # 100 steps of 1e-6 x 0.01 of 1.5
    assert means[0] - means[1] == pytest.approx(1.5e-6, rel=0.2)


def test_prodigy_finds_its_rate_without_being_told_any():
    """A parabola of 50 weights, 10 away from its minimum: 1e-6 is where it begins, and 1 what it is multiplied by."""
    target = 10 * torch.ones(50)
    weights = torch.nn.Parameter(torch.zeros(50))
    optimizer = make_optimizer(named(weights), Optimizer(optimizer="prodigy"))
    for _ in range(300):
        weights.grad = weights.detach() - target
        optimizer.step()
    distance = optimizer.state[weights]["distance"].item()
    assert 1 < distance <= math.sqrt(50) * 10 and (weights.detach() - target).abs().max() < 0.5
    assert Optimizer(optimizer="prodigy").learning_rate == 1.0


def test_lion_steps_by_the_sign_of_the_mean_and_the_gradient():
    weights, mean = torch.tensor([2.0, -1.0]), torch.zeros(2)
    for gradient in GRADIENTS:
        weights = weights - 0.1 * ((0.8 * mean + 0.2 * gradient).sign() + 0.5 * weights)
        mean = 0.95 * mean + 0.05 * gradient
    torch.testing.assert_close(trained("lion"), weights)


def test_the_optimizer_is_adamw_as_the_settings_say():
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    settings = Optimizer(learning_rate=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, adam_weight_decay=0.5)
    optimizer = make_optimizer(named(parameter), settings)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.8, 0.95), 1e-6, 0.5)
    parameter.grad = torch.tensor([3.0])
    optimizer.step()
    # decay: 2 - 0.1 * 0.5 * 2 = 1.9; the first step of Adam is the learning rate times the sign of the gradient
    torch.testing.assert_close(parameter.detach(), torch.tensor([1.8]), atol=1e-5, rtol=0)


def gradients_of(parameters: list[torch.nn.Parameter]) -> list[list[Tensor]]:
    noise = torch.Generator().manual_seed(1)
    return [[torch.randn(each.shape, generator=noise) for each in parameters] for _ in range(4)]


def weights_of_each_kind() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (3, 8), (5,), (4, 2, 3, 3))]


def step_by_step(parameters: list[torch.nn.Parameter], *optimizers: torch.optim.Optimizer) -> list[Tensor]:
    for gradients in gradients_of(parameters):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return [each.detach() for each in parameters]


def test_adafactor_is_that_of_torch():
    ours, theirs = weights_of_each_kind(), weights_of_each_kind()
    settings = Optimizer(optimizer="adafactor", learning_rate=0.6, adam_weight_decay=0.1)
    reference = torch.optim.Adafactor(theirs, lr=0.6, weight_decay=0.1)
    torch.testing.assert_close(
        step_by_step(ours, make_optimizer(named(*ours), settings)), step_by_step(theirs, reference)
    )


def test_muon_is_that_of_torch_for_matrices_inside_blocks_and_adamw_for_the_rest():
    ours, theirs = weights_of_each_kind(), weights_of_each_kind()
    names = ("blocks.1.to_q.weight", "blocks.10.to_q.weight", "blocks.1.norm.weight", "blocks.1.conv.weight")
    settings = Optimizer(optimizer="muon", learning_rate=0.1, adam_weight_decay=0.1)
    muon = make_optimizer(sharded_parameters(zip(names, ours, strict=True)), settings, ("blocks.1", "blocks.2"))
    reference = (
        torch.optim.Muon(theirs[:1], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[1:], lr=0.1, weight_decay=0.1),
    )
    found, wanted = step_by_step(ours, muon), step_by_step(theirs, *reference)
    torch.testing.assert_close(found[1:], wanted[1:])
    # torch iterates in bf16, and ours in float32 on a CPU; without weight decay each weight would be 4 % off
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=2e-3)
    table = sharded_parameters([("blocks.1.scale_shift_table", ours[0])])
    assert make_optimizer(table, settings, ("blocks.1",)).param_groups[0]["params"] == []


def test_schedule_free_adamw_averages_its_steps():
    parameter = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = make_optimizer(named(parameter), Optimizer(optimizer="adamw_schedulefree", **SETTINGS))
    assert isinstance(optimizer, ScheduleFreeAdamW)
    x = z = torch.tensor([2.0, -1.0])
    square, weights = torch.zeros(2), 0.0
    torch.testing.assert_close(optimizer.average(parameter), x)
    for step, (gradient, rate) in enumerate(zip(GRADIENTS * 2, (0.05, 0.1, 0.1, 0.1), strict=True), start=1):
        y = 0.2 * z + 0.8 * x  # algorithm 1 of the paper, in its own terms
        torch.testing.assert_close(parameter.detach(), y)
        square = 0.95 * square + 0.05 * gradient**2
        z = z - rate * (gradient / ((square / (1 - 0.95**step)).sqrt() + 1e-6) + 0.5 * y)
        weights += rate**2
        x = (1 - rate**2 / weights) * x + rate**2 / weights * z
        parameter.grad, optimizer.param_groups[0]["lr"] = gradient.clone(), rate
        optimizer.step()
        torch.testing.assert_close(optimizer.average(parameter), x)
