"""What an optimizer keeps of each weight, and the same in the layout of checkpoints, equal for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NamedTensors = Mapping[str, Tensor]

Read = Callable[[NamedTensors], None]
"""Fills tensors by name, in place; each rank reads only its own rows."""

NewMoments = Mapping[str, Callable[[], Tensor]]
"""What makes each moment of a parameter as it is before the first step, by name."""

TORCH_MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adagrad: ("sum",),
}


class ShardOptimizer(torch.optim.Optimizer):
    """An optimizer of our own over this rank's shards, which are plain tensors.

    A moment of as many dimensions as its weight is cut into the same rows; any other is whole on every rank.
    """

    def new_moments(self, parameter: Tensor) -> NewMoments:
        raise NotImplementedError


class ShardAdamW(ShardOptimizer):
    """What variants of AdamW share: its arguments, and parameters that are updated one by one.

    The foreach functions of torch would need the temporary tensors of all parameters at once.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


def new_moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> NewMoments:
    if isinstance(optimizer, ShardOptimizer):
        return optimizer.new_moments(parameter)
    return zero_moments(parameter, *TORCH_MOMENTS[type(optimizer)])


def zero_moments(parameter: Tensor, *names: str) -> NewMoments:
    return {name: partial(torch.zeros_like, parameter.detach(), dtype=torch.float32) for name in names}


@dataclass(frozen=True)
class OptimizerState:
    """`steps` taken so far, and a function per moment (`exp_avg`, ...) that returns its tensors by parameter name.

    Functions, so that one moment at a time is converted: an engine may have to copy it, and all would not fit twice.
    """

    steps: int = 0
    tensors: Mapping[str, Callable[[], NamedTensors]] = field(default_factory=dict)
