"""An exponential moving average of the weights, in float32, sharded as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from simpletuner.parallel.engine import local
from simpletuner.settings.sections import Ema


class Average:
    """The averaged weights by name, following `source`, the live ones; `updates` drives the warm-up of the decay."""

    def __init__(self, source: Mapping[str, Tensor], settings: Ema) -> None:
        self.source = {name: tensor.detach() for name, tensor in source.items() if tensor.is_floating_point()}
        self.weights = {name: tensor.to(torch.float32, copy=True) for name, tensor in self.source.items()}
        self.settings = settings
        self.updates = 0

    def decay(self) -> float:
        """Return min(decay, (1 + n) / (10 + n)), so that a young average is not held back by its start."""
        return min(self.settings.ema_decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the live weights, when this step is due."""
        if step % self.settings.ema_update_interval:
            return
        share = 1 - self.decay()
        for name, average in self.weights.items():
            local(average).lerp_(local(self.source[name]), share)
        self.updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the live weights for the average for a while."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self.weights.items():
            kept = local(average).clone()
            local(average).copy_(local(self.source[name]))
            local(self.source[name]).copy_(kept)
