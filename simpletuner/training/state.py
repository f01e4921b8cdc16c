"""A run's state between steps: what goes into a checkpoint and how it comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from simpletuner import __version__
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.checkpoints.saving import Snapshot
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.data.order import Order, Position
from simpletuner.parallel.moments import NamedTensors
from simpletuner.parallel.strategy import Strategy
from simpletuner.training.ema import Average


@dataclass
class TrainingState:
    """The engine, the average, how far the run goes, and where it begins; `data` is what positions refer to."""

    strategy: Strategy
    average: Average | None
    data: str
    max_steps: int
    step: int
    position: Position

    def snapshot(self, step: int, position: Position, facts: Mapping[str, Any]) -> Snapshot:
        """Return what a checkpoint after `step` holds; `facts` are for people who read its state.json."""
        moments = self.strategy.moments()
        groups: dict[str, Callable[[], NamedTensors]] = {"model": self.weights, **moments.tensors}
        if self.average is not None:
            groups["ema"] = self.average.tensors
        state = {
            "simpletuner": __version__,
            **facts,
            "max_steps": self.max_steps,
            "position": asdict(position),
            "data": self.data,
            "optimizer": {"steps": moments.steps, "moments": sorted(moments.tensors)},
            "ema_updates": self.average.updates if self.average is not None else None,
        }
        return Snapshot(step, groups, state, self.config())

    def weights(self) -> NamedTensors:
        """Return the trained weights as checkpoints hold them. All ranks take part."""
        return {name: self.strategy.neutral(name, part) for name, part in self.strategy.parts()}

    def config(self) -> dict[str, Any]:
        """Return the denoiser's config as diffusers writes it into config.json."""
        return json.loads(self.strategy.module.to_json_string())  # pyright: ignore[reportCallIssue]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Read optimizer state and average; the weights were read when the engine was built."""
        saved, updates = checkpoint.state["optimizer"], checkpoint.state["ema_updates"]

        def read(group: str, tensors: NamedTensors) -> None:
            """Fill one group of tensors."""
            read_tensors(checkpoint.files(group), tensors, f"{checkpoint.folder / group}")

        self.strategy.restore(saved["steps"], saved["moments"], read)
        if self.average is not None and updates is not None:
            self.average.restore(partial(read, "ema"), updates)
        self.step = checkpoint.step


def resumed_position(order: Order, saved: Mapping[str, Any], same_data: bool, batch_size: int) -> Position:
    """Return where to go on: exactly there for the same data, at the start of the next epoch for other data."""
    if same_data:
        return order.resized(Position(**saved), batch_size)
    return order.start(batch_size, epoch=saved["epoch"] + 1)
