"""An exponential moving average of the weights, in float32, in the slices in which the engine keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from simpletuner.parallel.engine import Engine
from simpletuner.parallel.optimizer_state import NamedTensors, Read
from simpletuner.settings.sections import Ema


class EMA:
    """This rank's part of each averaged weight by name, following the engine's; `updates` warms up the decay."""

    def __init__(self, engine: Engine, settings: Ema) -> None:
        self.engine, self.settings, self.updates = engine, settings, 0
        self.parts = {
            name: part.detach().to("cpu" if settings.ema_device == "cpu" else None, torch.float32, copy=True)
            for name, part in engine.local_shards()
            if part.is_floating_point()
        }

    def decay(self) -> float:
        """Return min(decay, (1 + n) / (10 + n)), so that a young average is not held back by its start."""
        return min(self.settings.ema_decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the live weights, when this step is due."""
        if step % self.settings.ema_update_interval:
            return
        share = 1 - self.decay()
        for name, part in self.engine.local_shards():
            if (average := self.parts.get(name)) is not None:
                average.lerp_(part.to(average), share)
        self.updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the live weights for the average for a while."""
        self.engine.update_shards(self._exchange)
        try:
            yield
        finally:
            self.engine.update_shards(self._exchange)

    def _exchange(self, name: str, part: Tensor) -> None:
        if (average := self.parts.get(name)) is not None:
            kept = average.clone()
            average.copy_(part)
            part.copy_(kept)

    def tensors(self) -> NamedTensors:
        """Return the average as checkpoints hold it. All ranks take part."""
        return {name: self.engine.to_checkpoint(name, average) for name, average in self.parts.items()}

    def restore(self, read: Read, updates: int) -> None:
        """Take over an average that `read` fills in. All ranks take part."""
        tensors = self.tensors()
        read(tensors)
        for name, average in self.parts.items():
            average.copy_(self.engine.from_checkpoint(name, tensors[name]))
        self.updates = updates
