"""AdamW over bf16 parameters, with or without remainders, and 8-bit moments (state_layout=split and bf16).

A split weight is float32 in two halves of 16 bits; moments are non-linear 8-bit codes. Both are read and
written as float32, so checkpoints need not know of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from simpletuner.data.sampler.epoch_order import hash_key
from simpletuner.parallel.optimizer_state import NewMoments, ShardAdamW, zero_moments
from simpletuner.parallel.torch_engine import ShardedParameter
from simpletuner.settings.declared.sections import Optimizer

# Values that share a scale: 4 / 128 bytes per value, and an outlier costs its neighbours alone precision.
BLOCK = 128

# The lowest code of it, scale / 255 ** 4, is still a normal float32 number.
SMALLEST_SCALE = 1e-28


def write_float32(values: Tensor, rounded: Tensor, remainder: Tensor) -> None:
    """Write the nearest bf16 numbers, and the int16 differences to the bits of `values`; all of one shape.

    Ties are rounded away from zero: rounded to even, half of them would differ by 32768, which int16 does not
    hold.
    """
    bits = values.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    rounded.view(torch.int16).copy_(upper)
    remainder.copy_(bits - (upper << 16))


def join_float32(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Inverse of `write_float32`, bit for bit."""
    return ((rounded.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def write_rounded(values: Tensor, rounded: Tensor, noise: Tensor) -> None:
    """Write one of the two bf16 neighbours of each of `values`, so that the expected value is right.
    `noise` is from `random_bits`; it is hashed again, since the moments use all of its bits."""
    rounded.view(torch.int16).copy_((values.view(torch.int32) + (mixed(noise) & 0xFFFF)) >> 16)


def random_bits(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return 32 bits for each value from `start`, a hash of its place and a seed below 2 ** 31: a kernel
    computes it as well, and memory holds none."""
    return mixed(torch.arange(count, dtype=torch.int32, device=device).add_(start).bitwise_xor_(seed))


def mixed(bits: Tensor) -> Tensor:
    """Hash int32 to int32: lowbias32 of https://nullprogram.com/blog/2018/07/31/; int32 wraps as uint32."""
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ (bits >> 16 & 0xFFFF)


def uniform(bits: Tensor) -> Tensor:
    """Return numbers in (0, 1) made of the lower 16 bits."""
    return (bits & 0xFFFF).float().add_(0.5).mul_(2**-16)


@dataclass
class QuantizedMoment:
    """A block-quantized moment of N values: code = round(max_code * (|x| / absmax) ** (1 / p)), 8 bits.

    Signed values (the mean) take the square root and int8, others (the mean of squares) the fourth root and
    uint8: so the mean and the root of the mean square, whose quotient is the update, have codes of equal
    relative precision. Reading and writing again changes no bit.
    """

    codes: Tensor
    """(N,), int8 or uint8."""
    scales: Tensor
    """(ceil(N / BLOCK),), float32."""

    @classmethod
    def zeros(cls, count: int, signed: bool, device: torch.device) -> QuantizedMoment:
        codes = torch.zeros(count, dtype=torch.int8 if signed else torch.uint8, device=device)
        return cls(codes, torch.zeros(-(-count // BLOCK), device=device))

    def read(self, start: int, count: int) -> Tensor:
        """Return so many values from `start`, where a block begins, in float32."""
        signed = self.codes.dtype == torch.int8
        ratios = self.codes[start : start + count].float().div_(127 if signed else 255)
        ratios = ratios * ratios.abs() if signed else ratios.square_().square_()
        return _in_blocks(ratios).mul_(self._scales(start, count)).view(-1)[:count]

    def write(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Replace the values from `start`, where a block begins; with `noise`, a number from 0 to 1 for each,
        codes are rounded stochastically.

        Nearest codes would hold a mean of squares fast: with a decay of 0.999 it changes by less than half a
        code.
        """
        signed, count = self.codes.dtype == torch.int8, values.numel()
        power, top = (2, 127) if signed else (4, 255)
        blocks = _in_blocks(values)
        scales = blocks.abs().amax(1, keepdim=True).clamp_(min=SMALLEST_SCALE)
        ratios = blocks / scales
        sizes = ratios.abs()
        levels = sizes.pow(1 / power).mul_(top)
        if noise is None:
            levels.round_()
        else:
            below = levels.floor()
            # Of a mean, so that the expected value is right: with the expected code right it would grow by up
            # to 1 / (2 code) ** 2 at each step. Of a mean of squares, so that the expected code is: updates
            # divide by its root, and over 2,000 steps they are 1.00 times as large as in float32, with the
            # value right 1.01 to 1.05.
            chance = (sizes * top**2 - below.square()) / (2 * below + 1) if signed else levels - below
            levels = below.add_(_in_blocks(noise) < chance)
        levels.clamp_(max=top)
        # A mean of squares that rounds to zero would divide by epsilon alone.
        levels = levels.copysign_(ratios) if signed else levels.maximum(ratios.sign())
        self.codes[start : start + count] = levels.view(-1)[:count].to(self.codes.dtype)
        self._scales(start, count).copy_(scales)

    def _scales(self, start: int, count: int) -> Tensor:
        return self.scales[start // BLOCK : -(-(start + count) // BLOCK)].unsqueeze(1)


def _in_blocks(values: Tensor) -> Tensor:
    """Return values as (blocks, BLOCK), the last one filled with zeros."""
    return F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


# Values that are float32 at once on a CPU: each temporary tensor has 16 MiB at most. A multiple of BLOCK.
CHUNK = 32768 * 128


class SplitAdamW(ShardAdamW):
    """Take the steps of torch's AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), computed in float32."""

    remainders: dict[Tensor, Tensor]
    """Low bits of each parameter that bf16 leaves out (int16, of its shape), written like the parameter
    itself. Those without are rounded stochastically."""

    gradient_scale: Tensor | None = None
    """Gradient factor of the next step. Clipped in place, bf16 gradients would be rounded again."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.remainders = {}
        self.numbers = {each: number for number, each in enumerate(self.param_groups[0]["params"])}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        [group] = self.param_groups
        updates = [self._update(each, each.grad, group) for each in group["params"] if each.grad is not None]
        if updates:
            device = updates[0].weight.device
            # Filled on the device: a copy of a number would wait for the GPU.
            scale = torch.ones((), device=device) if self.gradient_scale is None else self.gradient_scale
            if device.type == "cuda":
                update_on_gpu(*columns(updates), scale, *numbers(updates))
            else:
                for each in updates:
                    update_in_chunks(each, scale)
        self.gradient_scale = None

    def new_moments(self, parameter: Tensor) -> NewMoments:
        return zero_moments(parameter, "adamw")

    def start(self, parameter: Tensor, steps: int) -> dict[str, Any]:
        """Return the state of a parameter, with moments of zero, after so many steps."""
        moments = {
            name: QuantizedMoment.zeros(parameter.numel(), signed, parameter.device)
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
        }
        self.state[parameter] = {"step": steps, **moments}
        return self.state[parameter]

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Update:
        state = self.state.get(parameter) or self.start(parameter, 0)
        state["step"] += 1
        # Of step and number alone: a resumed run draws the same, and so do all copies of a weight.
        seed = hash_key(state["step"], self.numbers[parameter]) % 2**31
        bits, low = parameter.detach().view(torch.int16).view(-1), self.remainders.get(parameter)
        tensors = (bits, None if low is None else low.view(-1), gradient.view(-1))
        return Update(*tensors, state["exp_avg"], state["exp_avg_sq"], seed, factors_of(state["step"], group))


class Update(NamedTuple):
    """A step of a weight of N values, which changes all of its tensors but the gradient in place."""

    weight: Tensor
    """(N,), the int16 of its bits."""
    remainder: Tensor | None
    """(N,), int16."""
    gradient: Tensor
    """(N,), bf16 or float32."""
    mean: QuantizedMoment
    square: QuantizedMoment
    seed: int
    factors: list[float]
    """See `factors_of`."""


NUM_FACTORS = 7


def factors_of(steps: int, group: dict[str, Any]) -> list[float]:
    """Factors of a step: of the mean and the mean of squares, epsilon, of the weight, of the update."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    squares = (beta2, 1 - beta2, 1 - beta2**steps)
    return [1 - beta1, *squares, group["eps"], 1 - rate * group["weight_decay"], rate / (1 - beta1**steps)]


# Defined by its schema: `custom_op` takes the host 6 us more for each of a model's weights.
LIBRARY = torch.library.Library("simpletuner", "DEF")
LIBRARY.define(
    "split_adamw(Tensor(a!)[] weights, Tensor(b!)[] remainders, Tensor[] gradients, Tensor(c!)[] mean_codes, "
    "Tensor(d!)[] mean_scales, Tensor(e!)[] square_codes, Tensor(f!)[] square_scales, Tensor gradient_scale, "
    "int[] seeds, float[] factors) -> ()"
)
update_on_gpu = torch.ops.simpletuner.split_adamw.default


def update_all(
    weights: list[Tensor],
    remainders: list[Tensor],
    gradients: list[Tensor],
    mean_codes: list[Tensor],
    mean_scales: list[Tensor],
    square_codes: list[Tensor],
    square_scales: list[Tensor],
    gradient_scale: Tensor,
    seeds: list[int],
    factors: list[float],
) -> None:
    """Step many weights by one kernel; an operator of its own, so that a rehearsal counts it as one.

    `remainders` is empty where no weight has any, and `factors` are those of each weight in turn.
    """
    moments = map(QuantizedMoment, mean_codes, mean_scales), map(QuantizedMoment, square_codes, square_scales)
    each_factors = [factors[start : start + NUM_FACTORS] for start in range(0, len(factors), NUM_FACTORS)]
    low = remainders or [None] * len(weights)
    updates = [Update(*each) for each in zip(weights, low, gradients, *moments, seeds, each_factors, strict=True)]
    if importlib.util.find_spec("triton") is None:
        for each in updates:
            update_in_chunks(each, gradient_scale)
    else:
        from simpletuner.parallel.precision.split_kernel import launch

        launch(updates, gradient_scale)


def update_nothing(*_: object) -> None:
    """Take the place of a step over fake tensors, which have no values."""


LIBRARY.impl("split_adamw", update_all, "CUDA")
torch.library.register_fake("simpletuner::split_adamw", update_nothing, lib=LIBRARY)


def columns(updates: Sequence[Update]) -> tuple[list[Tensor], ...]:
    """Return the lists of tensors that `update_on_gpu` takes; an operator takes no objects."""
    return (
        [each.weight for each in updates],
        [each.remainder for each in updates if each.remainder is not None],
        [each.gradient for each in updates],
        [each.mean.codes for each in updates],
        [each.mean.scales for each in updates],
        [each.square.codes for each in updates],
        [each.square.scales for each in updates],
    )


def numbers(updates: Sequence[Update]) -> tuple[list[int], list[float]]:
    """Return the seeds and factors that `update_on_gpu` takes."""
    return [each.seed for each in updates], [factor for each in updates for factor in each.factors]


def update_in_chunks(update: Update, gradient_scale: Tensor) -> None:
    """Take a step of one weight by torch's operators."""
    weight, remainder, gradient, mean, square, seed, factors = update
    mean_share, square_kept, square_share, square_bias, epsilon, weight_kept, rate = factors
    for start in range(0, weight.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        bits, change = weight[part], gradient[part].float() * gradient_scale
        count, low = len(bits), None if remainder is None else remainder[part]
        means = mean.read(start, count).lerp_(change, mean_share)
        squares = square.read(start, count).mul_(square_kept).addcmul_(change, change, value=square_share)
        root = (squares / square_bias).sqrt_().add_(epsilon)
        exact = bits.view(torch.bfloat16).float() if low is None else join_float32(bits, low)
        exact.mul_(weight_kept).addcdiv_(means, root, value=-rate)
        noise = random_bits(seed, start, count, weight.device)
        if low is None:
            write_rounded(exact, bits, noise)
        else:
            write_float32(exact, bits, low)
        mean.write(start, means, uniform(noise))
        square.write(start, squares, uniform(noise >> 16))


def make_split_adamw(
    parameters: Mapping[str, ShardedParameter], settings: Optimizer, blocks: tuple[str, ...]
) -> SplitAdamW:
    shards, rate = [each.shard for each in parameters.values()], settings.learning_rate
    return SplitAdamW(shards, rate, settings.betas, settings.adam_epsilon, settings.adam_weight_decay)
