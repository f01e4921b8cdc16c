"""AdamW over weights that are held as bf16 parameters, perhaps with remainders, and moments of 8 bits."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from simpletuner.data.sampler.permutation import hash_key
from simpletuner.parallel.optimizer_state import NewMoments, ShardAdamW, zero_moments
from simpletuner.parallel.precision.split_state import (
    QuantizedMoment,
    join_float32,
    random_bits,
    uniform,
    write_float32,
    write_rounded,
)

CHUNK = 32768 * 128
"""Values that are float32 at once on a CPU: each temporary tensor has 16 MiB at most. A multiple of BLOCK."""


class SplitAdamW(ShardAdamW):
    """Take the steps of torch's AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), computed in float32."""

    remainders: dict[Tensor, Tensor]
    """Low bits of each parameter that bf16 leaves out (int16, of its shape), written like the parameter itself. Those
    without are rounded stochastically."""

    gradient_scale: Tensor | None = None
    """Factor of all gradients of the next step. Clipped in place, bf16 gradients would be rounded once more."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.remainders = {}
        self.numbers = {each: number for number, each in enumerate(self.param_groups[0]["params"])}

    def step(self, closure: None = None) -> None:
        super().step()
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

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state.get(parameter) or self.start(parameter, 0)
        state["step"] += 1
        # Of step and number alone: a resumed run draws the same, and so do all copies of a weight.
        seed = hash_key(state["step"], self.numbers[parameter]) % 2**31
        scale = self.gradient_scale
        if scale is None:
            scale = torch.ones((), device=parameter.device)  # filled there: a copy of a number would wait for the GPU
        bits, low = parameter.detach().view(torch.int16).view(-1), self.remainders.get(parameter)
        tensors = (bits, None if low is None else low.view(-1), gradient.view(-1))
        mean, square, factors = state["exp_avg"], state["exp_avg_sq"], factors_of(state["step"], group)
        if parameter.is_cuda:
            moments = (mean.codes, mean.scales, square.codes, square.scales)
            update_on_gpu(*tensors, *moments, scale, seed, factors)
        else:
            update_in_chunks(*tensors, mean, square, scale, seed, factors)


def factors_of(steps: int, group: dict[str, Any]) -> list[float]:
    """Return the factors of a step: of the mean and the mean of squares, epsilon, of the weight, of the update."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    squares = (beta2, 1 - beta2, 1 - beta2**steps)
    return [1 - beta1, *squares, group["eps"], 1 - rate * group["weight_decay"], rate / (1 - beta1**steps)]


@torch.library.custom_op(
    "simpletuner::split_adamw",
    mutates_args=("weight", "remainder", "mean_codes", "mean_scales", "square_codes", "square_scales"),
    device_types="cuda",
)
def update_on_gpu(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    mean_codes: Tensor,
    mean_scales: Tensor,
    square_codes: Tensor,
    square_scales: Tensor,
    gradient_scale: Tensor,
    seed: int,
    factors: list[float],
) -> None:
    """Take a step of a weight by one kernel; an operator of its own, so that a rehearsal counts it as one."""
    mean, square = QuantizedMoment(mean_codes, mean_scales), QuantizedMoment(square_codes, square_scales)
    if importlib.util.find_spec("triton") is None:
        update_in_chunks(weight, remainder, gradient, mean, square, gradient_scale, seed, factors)
    else:
        from simpletuner.parallel.precision.split_kernel import launch

        launch(weight, remainder, gradient, mean, square, gradient_scale, seed, factors)


@update_on_gpu.register_fake
def update_nothing(*_: Any) -> None:
    """Take the place of a step over fake tensors, which have no values."""


def update_in_chunks(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    mean: QuantizedMoment,
    square: QuantizedMoment,
    gradient_scale: Tensor,
    seed: int,
    factors: list[float],
) -> None:
    """Take a step of a weight (N,), given as the int16 of its bits, by torch's operators."""
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
