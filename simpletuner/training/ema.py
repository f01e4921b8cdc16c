"""Exponential moving average (EMA) of the weights, in float32, sharded as the engine shards them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from simpletuner.parallel.engine import Engine
from simpletuner.parallel.optimizer_state import NamedTensors, Read
from simpletuner.settings.sections import Ema, Validation

VARIANTS = {"none": ("trained",), "ema_only": ("ema",), "comparison": ("trained", "ema")}
"""Sets of weights to evaluate, by the setting ema_validation."""


class EMA:
    """This rank's shard of each averaged weight by name, of the shape that `Engine.local_shards` yields.

    A step costs one `lerp_` per shard and no communication, since the shards are cut like the weights themselves.
    """

    def __init__(self, engine: Engine, settings: Ema) -> None:
        self.engine, self.settings, self.updates = engine, settings, 0
        self.shards = {
            name: shard.detach().to("cpu" if settings.ema_device == "cpu" else None, torch.float32, copy=True)
            for name, shard in engine.local_shards()
            if shard.is_floating_point()
        }

    def decay(self) -> float:
        """Return min(decay, (1 + n) / (10 + n)) after n updates: a young average would remember its first weights."""
        return min(self.settings.ema_decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the trained weights, if an update is due after this step."""
        if step % self.settings.ema_update_interval:
            return
        weight = 1 - self.decay()
        for name, shard in self.engine.local_shards():
            if (average := self.shards.get(name)) is not None:
                average.lerp_(shard.to(average), weight)
        self.updates += 1

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Exchange the trained weights for the average within the block. Collective."""
        self.engine.update_shards(self._exchange)
        try:
            yield
        finally:
            self.engine.update_shards(self._exchange)

    def _exchange(self, name: str, shard: Tensor) -> None:
        if (average := self.shards.get(name)) is not None:
            kept = average.clone()
            average.copy_(shard)
            shard.copy_(kept)

    def tensors(self) -> NamedTensors:
        """Return the average in the checkpoint layout. Collective."""
        return {name: self.engine.to_checkpoint(name, average) for name, average in self.shards.items()}

    def restore(self, read: Read, updates: int) -> None:
        """Load an average: `read` fills tensors of the checkpoint layout in place. Collective."""
        tensors = self.tensors()
        read(tensors)
        for name, average in self.shards.items():
            average.copy_(self.engine.from_checkpoint(name, tensors[name]))
        self.updates = updates


def evaluated_variants(ema: EMA | None, validation: Validation) -> tuple[str, ...]:
    """Return the sets of weights that validation images and held-out losses are made with."""
    return VARIANTS[validation.ema_validation] if ema is not None else ("trained",)


def weights_of(ema: EMA | None, variant: str) -> AbstractContextManager[None]:
    """Put a set of weights into the denoiser within the block. Collective."""
    return ema.swapped_in() if variant == "ema" and ema is not None else nullcontext()
