"""The optimizer, and the learning rate as a function of the step alone, so that a resumed run cannot differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from simpletuner.parallel.split_adamw import SplitAdamW
from simpletuner.settings.sections import Optimizer
from simpletuner.training.schedule import Schedule

MOMENTS = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "adam": {"exp_avg", "exp_avg_sq"},
    "adagrad": {"sum"},
    "lion": {"exp_avg"},
}
"""State tensors that each optimizer keeps per weight. One with the same names can continue with another's."""


def make_optimizer(parameters: Iterable[nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer, fused where torch has a fused one.

    Sources: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), Adam (Kingma and Ba 2015, arXiv:1412.6980), Adagrad
    (Duchi et al. 2011), Lion (see there).
    """
    rate, decay, epsilon = settings.learning_rate, settings.adam_weight_decay, settings.adam_epsilon
    betas = (settings.adam_beta1, settings.adam_beta2)
    if settings.state_layout == "split":
        return SplitAdamW(parameters, rate, betas, epsilon, decay)
    if settings.optimizer == "lion":
        return Lion(parameters, rate, betas, decay)
    if settings.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=rate, eps=epsilon, weight_decay=decay)
    cls = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return cls(parameters, lr=rate, betas=betas, eps=epsilon, weight_decay=decay, fused=True)


class Lion(torch.optim.Optimizer):
    """Step by the sign of an interpolated gradient mean (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            trained: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            # foreach kernels: one launch per operation instead of one per tensor
            means = [self._mean(parameter) for parameter in trained]
            if trained:
                signs = torch._foreach_lerp(means, gradients, 1 - group["betas"][0])
                torch._foreach_sign_(signs)
                torch._foreach_mul_(trained, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(trained, signs, alpha=-group["lr"])
                torch._foreach_lerp_(means, gradients, 1 - group["betas"][1])

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
        state["step"] += 1
        return state["exp_avg"]


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the step."""

    schedule: Schedule
    settings: Optimizer

    def at(self, step: int) -> float:
        """Return the learning rate of the optimizer step that follows `step` finished ones."""
        settings = self.settings
        peak, end, warm_up = settings.learning_rate, settings.lr_end, settings.lr_warmup_steps
        if step < warm_up:
            return peak * (step + 1) / (warm_up + 1)
        progress = self.schedule.progress(step, warm_up)
        remaining = {
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
            "polynomial": (1 - progress) ** settings.lr_power,
        }.get(settings.lr_scheduler)
        return peak if remaining is None else end + (peak - end) * remaining
