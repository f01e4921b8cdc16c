"""The optimizer's state as every engine gives and takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Moments:
    """`steps` taken so far, and tensors such as `exp_avg` by parameter name, laid out like the parameters."""

    steps: int = 0
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
