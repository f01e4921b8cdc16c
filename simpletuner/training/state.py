"""The state of a run between steps: what a checkpoint holds, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from simpletuner import __version__
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.checkpoints.saving import Snapshot
from simpletuner.checkpoints.shards import planned
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.data.sampler.batch_sampler import DATA_VERSION, SamplerState
from simpletuner.parallel.engine import Engine
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.report import Report
from simpletuner.settings import Settings
from simpletuner.training.ema import EMA
from simpletuner.training.schedule import Schedule


@dataclass
class TrainingState:
    """Engine, EMA, schedule, and where in the data the run continues."""

    engine: Engine
    ema: EMA | None
    config: dict[str, Any]
    """The denoiser's config as it was built: FSDP2 changes the class of the module that it wraps."""
    trained: Mapping[str, Any]
    """Kind of weights: all of the denoiser's, or an adapter of some rank on some layers."""
    data_digest: str
    """Sampler states mean something for this data only."""
    schedule: Schedule
    step: int
    sampler_state: SamplerState
    base_fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Of the base model's files, by name."""
    base_checksums: Mapping[str, str] = field(default_factory=dict)
    """Of the files that an export copies from the base model, by name, as they were when the run began."""

    def snapshot(self, step: int, sampler_state: SamplerState, facts: Mapping[str, Any]) -> Snapshot:
        """Return what a checkpoint after `step` holds; `facts` are for people who read its state.json."""
        optimizer = self.engine.optimizer_state()
        state = {
            "simpletuner": __version__,
            **facts,
            **self.trained,
            **self.schedule.as_json(),
            # Without the step, which the checkpoint has itself: two numbers could differ.
            "position": {name: value for name, value in asdict(sampler_state).items() if name != "step"},
            "data": self.data_digest,
            "data_version": DATA_VERSION,
            "base": dict(self.base_fingerprints),
            "base_checksums": dict(self.base_checksums),
            "optimizer": {"steps": optimizer.steps, "moments": sorted(optimizer.tensors)},
            "ema_updates": self.ema.updates if self.ema is not None else None,
        }
        groups = {name: planned(make) for name, make in self.groups().items()}
        return Snapshot(step, groups, state, self.config)

    def groups(self) -> dict[str, Callable[[], NamedTensors]]:
        """Return what makes each group of a checkpoint, in the checkpoint layout. Collective to call."""
        average = {"ema": self.ema.tensors} if self.ema is not None else {}
        return {"model": self.weights, **self.engine.optimizer_state().tensors, **average}

    def weights(self) -> NamedTensors:
        """Return the trained weights in the checkpoint layout. Collective."""
        return {name: self.engine.to_checkpoint(name, shard) for name, shard in self.engine.local_shards()}

    def restore(self, checkpoint: Checkpoint, settings: Settings, report: Report) -> None:
        """Read optimizer state and EMA; the weights were read when the engine was built. Collective.

        State of another optimizer is left out with a warning, and an EMA that the checkpoint lacks starts from its
        weights: a changed setting must not cost the rest of the run.
        """
        saved, updates = checkpoint.state["optimizer"], checkpoint.state["ema_updates"]

        def read(group: str, tensors: NamedTensors) -> None:
            read_tensors(checkpoint.files(group), tensors, f"{checkpoint.folder / group}")

        if not saved["steps"] or sorted(saved["moments"]) == sorted(self.engine.moments()):
            self.engine.load_optimizer_state(saved["steps"], saved["moments"], read)
        else:
            report.warn(
                f"{checkpoint.folder.name} holds the state of another optimizer ({', '.join(saved['moments'])}): "
                f"{settings.optimizer.optimizer} starts without state; weights, EMA and data go on"
            )
        if self.ema is not None and updates is not None:
            self.ema.restore(partial(read, "ema"), updates)
        elif self.ema is not None:
            report.warn(f"{checkpoint.folder.name} holds no EMA: it starts from the weights of step {checkpoint.step}")
        elif updates is not None:
            report.warn(f"use_ema is off: the EMA in {checkpoint.folder.name} is not continued in later checkpoints")
        self.step = checkpoint.step
