"""The optimizer's state as every engine gives and takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

NamedTensors = Mapping[str, Tensor]

Read = Callable[[NamedTensors], None]
"""What fills tensors by name; each rank reads only its own slices."""


@dataclass(frozen=True)
class OptimizerState:
    """`steps` taken so far, and what makes the tensors of each moment (`exp_avg`, ...) when it is their turn.

    One moment at a time, because an engine may have to make them: then no more than one is there twice.
    """

    steps: int = 0
    tensors: Mapping[str, Callable[[], NamedTensors]] = field(default_factory=dict)
