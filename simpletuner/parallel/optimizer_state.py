"""Optimizer state in the layout of checkpoints, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

NamedTensors = Mapping[str, Tensor]

Read = Callable[[NamedTensors], None]
"""Fills tensors by name, in place; each rank reads only its own rows."""


@dataclass(frozen=True)
class OptimizerState:
    """`steps` taken so far, and a function per moment (`exp_avg`, ...) that returns its tensors by parameter name.

    Functions, so that one moment at a time is converted: an engine may have to copy it, and all would not fit twice.
    """

    steps: int = 0
    tensors: Mapping[str, Callable[[], NamedTensors]] = field(default_factory=dict)
