"""The engine for everything that torch itself trains; how gradients are reduced and cast is passed in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simpletuner.parallel.moments import Moments, read_moments, write_moments


@dataclass(frozen=True)
class TorchEngine:
    """A Strategy around a torch model and optimizer; `forward_pass` and `drawing` are what replicated and sharded
    engines do differently."""

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    forward_pass: Callable[[bool], AbstractContextManager[None]]
    drawing: Callable[[], AbstractContextManager[None]]

    def backward(self, loss: Tensor) -> None:
        """Add gradients."""
        loss.backward()

    def update(self, learning_rate: float, max_grad_norm: float) -> Tensor:
        """Clip by the global norm, step, clear; return the norm before clipping."""
        grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_grad_norm or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm

    def weights(self) -> dict[str, Tensor]:
        """Return the float32 masters by name, as DTensors where they are sharded."""
        return self.module.state_dict()

    def moments(self) -> Moments:
        """Return the optimizer's state."""
        return read_moments(self.optimizer, self.module)

    def restore(self, moments: Moments) -> None:
        """Put the optimizer's state back."""
        write_moments(self.optimizer, self.module, moments)
