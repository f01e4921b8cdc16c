"""AdamW over float32 weights that are held as bf16 parameters and remainders, with moments of 8 bits."""

from __future__ import annotations

from typing import Any

from torch import Generator, Tensor

from simpletuner.data.sampler.permutation import hash_key
from simpletuner.parallel.devices.memory import SPLIT_CHUNK
from simpletuner.parallel.optimizer_state import NewMoments, ShardAdamW, zero_moments
from simpletuner.parallel.precision.split_state import QuantizedMoment, join_float32, write_float32

CHUNK = SPLIT_CHUNK
"""Values that are float32 at once: each temporary tensor of a step has 16 MiB at most. A multiple of BLOCK."""


class SplitAdamW(ShardAdamW):
    """Take the steps of torch's AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), computed in float32."""

    remainders: dict[Tensor, Tensor]
    """Low bits of each parameter that bf16 leaves out (int16, of its shape), written like the parameter itself."""

    gradient_scale: Tensor | float = 1.0
    """Factor of all gradients of the next step. Clipped in place, bf16 gradients would be rounded once more."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.remainders = {}
        self.numbers = {each: number for number, each in enumerate(self.param_groups[0]["params"])}

    def step(self, closure: None = None) -> None:
        super().step()
        self.gradient_scale = 1.0

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
        # Of step and number alone: a resumed run draws the same, and so do all copies of a weight. Hashed, since on a
        # CPU torch's generator keeps the lower 32 bits of a seed only (ATen/core/MT19937RNGEngine.h).
        noise = Generator(parameter.device).manual_seed(hash_key(state["step"], self.numbers[parameter]))
        tensors = [tensor.view(-1) for tensor in (parameter.detach(), self.remainders[parameter], gradient)]
        for start in range(0, parameter.numel(), CHUNK):
            weight, remainder, part = (tensor[start : start + CHUNK] for tensor in tensors)
            self._update_chunk(weight, remainder, part, start, state, group, noise)

    def _update_chunk(
        self,
        weight: Tensor,
        remainder: Tensor,
        gradient: Tensor,
        start: int,
        state: dict[str, Any],
        group: dict[str, Any],
        noise: Generator,
    ) -> None:
        """Update the values from `start`; all tensors are (N,), where N <= CHUNK."""
        steps, rate, (beta1, beta2) = state["step"], group["lr"], group["betas"]
        gradient = gradient.float() * self.gradient_scale
        mean = state["exp_avg"].read(start, len(weight)).lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].read(start, len(weight)).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        exact = join_float32(weight, remainder).mul_(1 - rate * group["weight_decay"])
        write_float32(exact.addcdiv_(mean, root, value=-rate / (1 - beta1**steps)), weight, remainder)
        state["exp_avg"].write(start, mean, noise)
        state["exp_avg_sq"].write(start, square, noise)
