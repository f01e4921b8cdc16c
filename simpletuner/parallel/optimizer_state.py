"""Optimizer state of each weight, and the same in the layout of checkpoints, equal for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from simpletuner.parallel.moments import moment_shapes

NamedTensors = Mapping[str, Tensor]

Read = Callable[[NamedTensors], None]
"""Fills tensors by name, in place; each rank reads only its own rows."""

NewMoments = Mapping[str, Callable[[], Tensor]]
"""Functions that make each moment of a parameter as it is before the first step, by name."""


class ShardOptimizer(torch.optim.Optimizer):
    """An optimizer of our own over this rank's shards, which are plain tensors."""

    def new_moments(self, parameter: Tensor) -> NewMoments:
        raise NotImplementedError


class ShardAdamW(ShardOptimizer):
    """Base of AdamW's variants: its arguments."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


def new_moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> NewMoments:
    if isinstance(optimizer, ShardOptimizer):
        return optimizer.new_moments(parameter)
    return zero_moments(parameter, type(optimizer).__name__.lower())  # torch's: AdamW, Adam and Adagrad


def zero_moments(parameter: Tensor, optimizer: str, is_hidden_matrix: bool = False) -> dict[str, Callable[[], Tensor]]:
    zeros, shapes = parameter.detach().new_zeros, moment_shapes(optimizer, tuple(parameter.shape), is_hidden_matrix)
    return {name: partial(zeros, shape, dtype=torch.float32) for name, shape in shapes.items()}


@dataclass(frozen=True)
class OptimizerState:
    """`steps` taken so far, and a function per moment (`exp_avg`, ...) that returns its tensors by parameter
    name.

    Functions, so that one moment at a time is converted: an engine may have to copy it, and all would not fit
    twice.
    """

    steps: int = 0
    tensors: Mapping[str, Callable[[], NamedTensors]] = field(default_factory=dict)
