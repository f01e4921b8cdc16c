"""A run's state between steps: what goes into a checkpoint and how it comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from simpletuner.caches.keys import short_hash
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.checkpoints.saving import Snapshot
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.data.buckets import Buckets
from simpletuner.data.discovery import Sample
from simpletuner.data.order import Order, Position
from simpletuner.parallel.moments import empty_moments
from simpletuner.parallel.strategy import Strategy
from simpletuner.training.ema import Average


@dataclass(frozen=True)
class TrainingState:
    """The engine, the average, and the identity of the data that positions refer to."""

    strategy: Strategy
    average: Average | None
    data_digest: str
    facts: dict[str, Any]
    """What else a reader of `state.json` may want to know, such as the model family and the number of ranks."""

    def snapshot(self, step: int, position: Position) -> Snapshot:
        """Return what a checkpoint after `step` holds."""
        moments = self.strategy.moments()
        groups: dict[str, dict[str, Tensor]] = {"model": self.strategy.weights(), **moments.tensors}
        if self.average is not None:
            groups["ema"] = self.average.weights
        state = {
            **self.facts,
            "position": asdict(position),
            "data": self.data_digest,
            "optimizer": {"steps": moments.steps, "moments": sorted(moments.tensors)},
            "ema_updates": self.average.updates if self.average is not None else None,
        }
        return Snapshot(step, groups, state, self.config())

    def config(self) -> dict[str, Any]:
        """Return the denoiser's config as diffusers writes it into config.json."""
        return json.loads(self.strategy.module.to_json_string())  # pyright: ignore[reportCallIssue]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Read optimizer state and average; the weights were read when the engine was built."""
        saved = checkpoint.state["optimizer"]
        moments = empty_moments(self.strategy.module, saved["moments"])
        moments.steps = saved["steps"]
        for name, tensors in moments.tensors.items():
            read_tensors(checkpoint.files(name), tensors, f"{checkpoint.folder / name}")
        self.strategy.restore(moments)
        if self.average is not None and checkpoint.state["ema_updates"] is not None:
            read_tensors(checkpoint.files("ema"), self.average.weights, f"{checkpoint.folder / 'ema'}")
            self.average.updates = checkpoint.state["ema_updates"]


def digest_of(buckets: Buckets, samples: list[Sample], seed: int) -> str:
    """Return the identity of what an order is made from."""
    return short_hash([seed, {name: [samples[index].id for index in items] for name, items in buckets.items()}])


def resumed_position(order: Order, buckets: Buckets, saved: dict[str, Any], same_data: bool, batch_size: int) -> Position:
    """Return where to go on: exactly there for the same data, at the start of the next epoch for other data."""
    if same_data:
        return order.resized(Position(**saved), batch_size)
    epoch = saved["epoch"] + 1
    return Position(epoch, 0, batch_size, {name: epoch * len(items) for name, items in buckets.items()})
