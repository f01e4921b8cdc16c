"""state_layout=split and bf16: halves of float32 and moments in 8 bits, as tensors, and beside other ways to train."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from simpletuner.parallel.precision.split_adamw import (
    BLOCK,
    SMALLEST_SCALE,
    QuantizedMoment,
    SplitAdamW,
    join_float32,
    mixed,
    random_bits,
    uniform,
    write_float32,
    write_rounded,
)
from simpletuner.parallel.torch_engine import ShardedParameter, sharded_parameters
from simpletuner.settings.declared.sections import Optimizer
from simpletuner.tools.plan.measure import HOST_BYTES
from simpletuner.training.optimizers import make_optimizer

NORMAL = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def named(*parameters: nn.Parameter) -> dict[str, ShardedParameter]:
    return sharded_parameters((str(number), each) for number, each in enumerate(parameters))


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    rounded, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    write_float32(values, rounded, remainder)
    return rounded, remainder


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200))
def test_two_halves_are_every_float32_number_bit_for_bit(bits: list[int]):
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert join_float32(*halves(values)).view(torch.int32).tolist() == bits


@given(st.lists(NORMAL, min_size=1, max_size=200))
def test_the_upper_half_is_the_nearest_bf16_number(numbers: list[float]):
    values = torch.tensor(numbers)
    rounded, nearest = halves(values)[0].double(), values.bfloat16().double()
    assert torch.equal((rounded - values.double()).abs(), (nearest - values.double()).abs())


@given(st.lists(NORMAL.filter(lambda x: abs(x) < 1e30), min_size=1, max_size=3 * BLOCK), st.booleans())
def test_a_moment_is_near_what_was_written_and_what_was_read_is_written_bit_for_bit(numbers: list[float], signed: bool):
    values = torch.tensor(numbers)
    values = values if signed else values.abs()
    moment = QuantizedMoment.zeros(len(numbers), signed, values.device)
    moment.write(0, values)
    read = moment.read(0, len(numbers))
    for start in range(0, len(numbers), BLOCK):
        block, found = values[start : start + BLOCK].double(), read[start : start + BLOCK].double()
        largest = max(block.abs().max().item(), SMALLEST_SCALE)
        power, codes = (2, 127) if signed else (4, 255)
        level = (block.abs() / largest) ** (1 / power)
        near = (found.abs() / largest) ** (1 / power)
        # the lowest code stands for all that is not zero in a mean of squares
        assert ((level - near).abs() * codes <= (0.501 if signed else 1.001)).all()
        assert (found[block == 0] == 0).all() and (signed or (found[block > largest * 1e-30] > 0).all())
    again = QuantizedMoment.zeros(len(numbers), signed, values.device)
    again.write(0, read)
    assert torch.equal(again.codes, moment.codes) and torch.equal(again.read(0, len(numbers)), read)


def test_a_mean_of_squares_follows_gradients_that_become_smaller():
    count, decay, noise = 64 * BLOCK, 0.999, torch.Generator().manual_seed(0)
    sizes = torch.randn(count, generator=noise).exp()
    sizes[1::2] *= 0.1
    exact = torch.zeros(count)
    moments = {name: QuantizedMoment.zeros(count, False, exact.device) for name in ("stochastic", "nearest")}
    for step in range(2000):
        if step == 400:
            sizes[1::2] = 0
        square = (torch.randn(count, generator=noise) * sizes).square()
        exact.lerp_(square, 1 - decay)
        for name, moment in moments.items():
            drawn = torch.rand(count, generator=noise) if name == "stochastic" else None
            moment.write(0, moment.read(0, count).lerp_(square, 1 - decay), drawn)
    ratios = {name: (each.read(0, count) / exact).sqrt()[1::2].median().item() for name, each in moments.items()}
    assert ratios["stochastic"] == pytest.approx(1, abs=0.1)
    assert ratios["nearest"] > 1.3, "rounding to the nearest code holds the mean, so this test would not see it"


def test_the_expected_value_of_a_rounded_mean_is_the_mean():
    noise, times = torch.Generator().manual_seed(0), 1000
    values = torch.randn(16 * BLOCK, generator=noise)
    values[1::2] *= 0.02  # code 18 of 127 for the largest of them
    moment, total = QuantizedMoment.zeros(len(values), True, values.device), torch.zeros_like(values)
    for _ in range(times):
        moment.write(0, values, torch.rand(values.shape, generator=noise))
        total += moment.read(0, len(values))
    assert (total / times / values)[1::2].median().item() == pytest.approx(1, abs=0.0005)


def test_the_expected_value_of_a_rounded_weight_is_the_weight():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    rounded, total, times = torch.empty_like(values, dtype=torch.bfloat16), torch.zeros_like(values), 400
    for seed in range(times):
        write_rounded(values, rounded, random_bits(seed, 0, len(values), values.device))
        total += rounded.float()
        assert ((rounded.float() - values).abs() <= values.abs() / 128).all(), "one of the two neighbours"
    apart = (total / times - values) / values.abs()
    assert apart.abs().max() < 1e-3 and apart.mean().abs() < 5e-5
    before = rounded.clone()
    write_rounded(rounded.float(), rounded, random_bits(0, 0, len(values), values.device))
    assert torch.equal(rounded, before), "what is a bf16 number stays"


def test_the_three_draws_of_a_value_are_uniform_and_know_nothing_of_each_other():
    def draws_of(seed: int) -> Tensor:
        bits = random_bits(seed, 1 << 20, 1 << 18, torch.device("cpu"))
        return torch.stack([uniform(bits), uniform(bits >> 16), uniform(mixed(bits))])

    draws = draws_of(7)
    assert draws.min() > 0 and draws.max() < 1
    assert draws.mean(1).tolist() == pytest.approx([0.5] * 3, abs=3e-3)
    assert draws.var(1).tolist() == pytest.approx([1 / 12] * 3, rel=0.01)
    assert (torch.corrcoef(torch.cat([draws, draws_of(8)])) - torch.eye(6)).abs().max() < 0.01
    low = draws[0]
    assert (torch.corrcoef(torch.stack([low[1:], low[:-1]]))[0, 1]).abs() < 0.01


def losses_of(layout: str, steps: int = 40) -> Tensor:
    """Train a small network in float32 arithmetic, its weights held in one of three ways; return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 4))
    exact = [parameter.detach().clone() for parameter in model.parameters()]
    parameters = list(model.parameters() if layout == "fp32" else model.bfloat16().parameters())
    settings = Optimizer(state_layout="fp32" if layout == "fp32" else "split", learning_rate=1e-4)
    optimizer = make_optimizer(named(*parameters), settings)
    if isinstance(optimizer, SplitAdamW) and layout != "bf16":
        for parameter, values in zip(parameters, exact, strict=True):
            optimizer.remainders[parameter] = torch.empty_like(parameter, dtype=torch.int16)
            write_float32(values, parameter.data, optimizer.remainders[parameter])
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 32)
        loss = (model(inputs.to(parameters[0].dtype)).float() - inputs[:, :4].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if layout == "bf16 alone" and isinstance(optimizer, SplitAdamW):
            for remainder in optimizer.remainders.values():
                remainder.zero_()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_losses_are_those_of_float32_which_they_are_not_without_the_remainders():
    exact = losses_of("fp32")
    change = exact[0] - exact[-10:].mean()
    assert (losses_of("split")[-10:] - exact[-10:]).abs().max() < 0.01 * change
    assert (losses_of("bf16 alone")[-10:] - exact[-10:]).abs().min() > 0.05 * change
    assert (losses_of("bf16")[-10:] - exact[-10:]).abs().max() < 0.04 * change, "rounded stochastically"


def split_over(values: Tensor, count: int = 1, **settings: float) -> SplitAdamW:
    """Return an optimizer over so many bf16 weights, each of which begins as `values`."""
    weights = [nn.Parameter(torch.empty_like(values, dtype=torch.bfloat16)) for _ in range(count)]
    optimizer = make_optimizer(named(*weights), Optimizer(state_layout="split", **settings))
    assert isinstance(optimizer, SplitAdamW)
    for weight in weights:
        optimizer.remainders[weight] = torch.empty_like(weight, dtype=torch.int16)
        write_float32(values, weight.data, optimizer.remainders[weight])
    return optimizer


def codes_after(step: int, gradient: Tensor) -> list[Tensor]:
    """Return the codes of the means of two equal weights after a step from moments of zero, which has this number."""
    optimizer = split_over(torch.zeros(len(gradient)), 2)
    for weight in optimizer.param_groups[0]["params"]:
        optimizer.start(weight, step - 1)
        weight.grad = gradient.bfloat16()
    optimizer.step()
    return [state["exp_avg"].codes for state in optimizer.state.values()]


def test_noise_differs_between_steps_and_weights_and_is_that_of_the_step_after_a_resume():
    gradient = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(0))
    found = {step: codes_after(step, gradient) for step in (1, 2, 3, 1 << 16)}
    for step, (one, other) in found.items():
        assert torch.equal(one, codes_after(step, gradient)[0])
        # Codes differ where only one of two draws rounds up: a third of them, with fractions that are uniform.
        assert 0.25 < (one != other).float().mean() < 0.4, f"two weights share the noise of step {step}"
    for step in (2, 3, 1 << 16):
        differing = (found[1][0] != found[step][0]).float().mean()
        assert 0.25 < differing < 0.4, f"step {step} rounds with the noise of step 1"


def test_weights_travel_as_far_as_those_of_torch_over_hundreds_of_steps():
    noise, steps = torch.Generator().manual_seed(0), 300
    values = torch.zeros(64 * BLOCK)
    split, exact = split_over(values, learning_rate=1e-3), nn.Parameter(values.clone())
    theirs = make_optimizer(named(exact), Optimizer(learning_rate=1e-3))
    (weight,) = split.param_groups[0]["params"]
    for _ in range(steps):
        weight.grad = (0.1 + torch.randn(values.shape, generator=noise)).bfloat16()
        exact.grad = weight.grad.float()
        split.step()
        theirs.step()
    travel = join_float32(weight.detach(), split.remainders[weight])
    apart = ((travel - exact.detach()).norm() / exact.detach().norm()).item()
    roots = [
        each.sqrt()
        for each in (split.state[weight]["exp_avg_sq"].read(0, len(values)), theirs.state[exact]["exp_avg_sq"])
    ]
    ratios = (roots[0] / roots[1]).quantile(torch.tensor([0.01, 0.99])).tolist()
    assert apart < 0.05
    assert ratios == pytest.approx([1, 1], abs=0.1)


@pytest.mark.parametrize(("layout", "held_bytes"), [("split", 6), ("bf16", 4)])
def test_six_or_four_bytes_per_parameter_are_held_between_steps(layout, held_bytes):
    parameter = nn.Parameter(torch.ones(64 * BLOCK + 1, dtype=torch.bfloat16))
    optimizer = make_optimizer(named(parameter), Optimizer(state_layout=layout))
    assert isinstance(optimizer, SplitAdamW)
    if layout == "split":
        optimizer.remainders[parameter] = torch.zeros_like(parameter, dtype=torch.int16)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
    held = [parameter, *optimizer.remainders.values(), *(t for each in state for t in (each.codes, each.scales))]
    blocks = 65
    assert sum(tensor.nbytes for tensor in held) == held_bytes * parameter.numel() + 8 * blocks


def test_a_step_of_several_chunks_is_that_of_torch(monkeypatch):
    values, gradient = torch.randn(3 * BLOCK + 5), torch.randn(3 * BLOCK + 5).bfloat16()
    monkeypatch.setattr("simpletuner.parallel.precision.split_adamw.CHUNK", BLOCK)
    settings = {"learning_rate": 0.1, "adam_weight_decay": 0.5}
    optimizer, theirs = split_over(values, **settings), nn.Parameter(values.clone())
    (split,) = optimizer.param_groups[0]["params"]
    optimizer.gradient_scale = torch.tensor(0.5)
    split.grad, theirs.grad = gradient, 0.5 * gradient.float()
    for each in (optimizer, make_optimizer(named(theirs), Optimizer(**settings))):
        each.step()
    torch.testing.assert_close(join_float32(split.detach(), optimizer.remainders[split]), theirs.detach())
    assert optimizer.gradient_scale is None


class BytesMoved(TorchDispatchMode):
    """Counts what operators read and write."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in tree_iter((args, kwargs, made)) if isinstance(each, Tensor)]
            self.count += sum(each.nbytes for each in tensors)
        return made


@pytest.mark.parametrize("keeps_remainder", [True, False])
def test_a_step_on_the_host_moves_what_plan_counts(keeps_remainder):
    values = torch.randn(256 * BLOCK)
    optimizer = split_over(values)
    (weight,) = optimizer.param_groups[0]["params"]
    if not keeps_remainder:
        optimizer.remainders = {}
    weight.grad = values.bfloat16()
    optimizer.step()
    with BytesMoved() as moved:
        optimizer.step()
    assert moved.count / len(values) == pytest.approx(HOST_BYTES, rel=0.1)
