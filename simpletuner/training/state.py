"""A run's state between steps: what goes into a checkpoint and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from simpletuner import __version__
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.checkpoints.saving import Snapshot
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.data.batch_sampler import SamplerState
from simpletuner.parallel.engine import Engine
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.report import Report
from simpletuner.settings import Settings
from simpletuner.training.ema import EMA
from simpletuner.training.optimizers import MOMENTS
from simpletuner.training.schedule import Schedule


@dataclass
class TrainingState:
    """The engine, the average, how far the run goes, and where it begins.

    `config` is the denoiser's as it was built: an engine may change the class of the module that it wraps (FSDP2 does).
    `data` is what positions refer to, `base` stands for the base model's files by name.
    """

    engine: Engine
    average: EMA | None
    config: dict[str, Any]
    data: str
    data_version: int
    schedule: Schedule
    step: int
    position: SamplerState
    base: Mapping[str, str] = field(default_factory=dict)

    def snapshot(self, step: int, position: SamplerState, facts: Mapping[str, Any]) -> Snapshot:
        """Return what a checkpoint after `step` holds; `facts` are for people who read its state.json."""
        moments = self.engine.optimizer_state()
        groups: dict[str, Callable[[], NamedTensors]] = {"model": self.weights, **moments.tensors}
        if self.average is not None:
            groups["ema"] = self.average.tensors
        state = {
            "simpletuner": __version__,
            **facts,
            **self.schedule.as_json(),
            "position": asdict(position),
            "data": self.data,
            "data_version": self.data_version,
            "base": dict(self.base),
            "optimizer": {"steps": moments.steps, "moments": sorted(moments.tensors)},
            "ema_updates": self.average.updates if self.average is not None else None,
        }
        return Snapshot(step, groups, state, self.config)

    def weights(self) -> NamedTensors:
        """Return the trained weights as checkpoints hold them. All ranks take part."""
        return {name: self.engine.to_checkpoint(name, part) for name, part in self.engine.local_shards()}

    def restore(self, checkpoint: Checkpoint, settings: Settings, report: Report) -> None:
        """Read the optimizer's state and the average; the weights were read when the engine was built.

        State of another optimizer is left out, and an average that was not kept starts from the weights, with a word.
        """
        saved, updates = checkpoint.state["optimizer"], checkpoint.state["ema_updates"]

        def read(group: str, tensors: NamedTensors) -> None:
            """Fill one group of tensors."""
            read_tensors(checkpoint.files(group), tensors, f"{checkpoint.folder / group}")

        if not saved["steps"] or set(saved["moments"]) == MOMENTS[settings.optimizer.optimizer]:
            self.engine.load_optimizer_state(saved["steps"], saved["moments"], read)
        else:
            report.warn(
                f"{checkpoint.folder.name} holds the state of another optimizer ({', '.join(saved['moments'])}): "
                f"{settings.optimizer.optimizer} starts without state; weights, EMA and data go on"
            )
        if self.average is not None and updates is not None:
            self.average.restore(partial(read, "ema"), updates)
        elif self.average is not None:
            report.warn(f"{checkpoint.folder.name} holds no EMA: it starts from the weights of step {checkpoint.step}")
        elif updates is not None:
            report.warn(f"use_ema is off: the EMA in {checkpoint.folder.name} is not continued in later checkpoints")
        self.step = checkpoint.step
