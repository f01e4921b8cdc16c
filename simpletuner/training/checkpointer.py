"""Numbered checkpoints, written while training goes on where memory allows, and their state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from simpletuner import __version__
from simpletuner.checkpoints.layout import Checkpoint, ChooseStep, no_best
from simpletuner.checkpoints.saving import BackgroundSaver, Snapshot, save
from simpletuner.checkpoints.tensors import planned, read_tensors
from simpletuner.data.sampler.batch_sampler import DATA_VERSION, SamplerState
from simpletuner.parallel.engine import Engine
from simpletuner.parallel.optimizer_state import NamedTensors, OptimizerState
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.system.processes.host_memory import available_bytes
from simpletuner.training.ema import EMA
from simpletuner.training.metrics.speed import EXPORTING, SAVING, UPLOADING, WRITING, Durations
from simpletuner.training.optimizers import Schedule


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
    """Hashes of the base model's files, by name."""
    base_checksums: Mapping[str, str] = field(default_factory=dict)
    """Checksums at the run's begin of the base model's files that an export copies, by name."""

    def snapshot(self, step: int, sampler_state: SamplerState, facts: Mapping[str, object]) -> Snapshot:
        """Copy the state of a checkpoint after `step`; `facts` are for people who read its state.json."""
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
        groups = {name: planned(make) for name, make in self.groups(optimizer).items()}
        return Snapshot(step, groups, state, self.config, self.engine.saves_views)

    def groups(self, optimizer: OptimizerState) -> dict[str, Callable[[], NamedTensors]]:
        """Map each group of a checkpoint to a function of its tensors. Collective to call."""
        average = {"ema": self.ema.tensors} if self.ema is not None else {}
        return {"model": self.weights, **optimizer.tensors, **average}

    def weights(self) -> NamedTensors:
        """Return the trained weights in the checkpoint layout. Collective."""
        return {name: self.engine.to_checkpoint(name, shard) for name, shard in self.engine.local_shards()}

    def restore(self, checkpoint: Checkpoint, settings: Settings, report: Report) -> None:
        """Read optimizer state and EMA; the weights were read when the engine was built. Collective.

        State of another optimizer is left out with a warning, and an EMA that the checkpoint lacks starts
        from its weights: a changed setting must not cost the rest of the run.
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


EXPORTED = ("model", "ema")
"""The groups of a checkpoint that are exported, too."""


class Checkpointer:
    """Save a run's state as numbered checkpoints, during training with `async_checkpointing`."""

    def __init__(
        self,
        session: Session,
        state: TrainingState,
        durations: Durations,
        size_bytes: int,
        choose_best: ChooseStep = no_best,
    ) -> None:
        """`size_bytes` is one checkpoint's, over all ranks; `choose_best` names one to keep. Collective."""
        self.choose_best = choose_best
        self.durations, self.size_bytes = durations, size_bytes
        self.settings, self.world, self.state, self.report = session.settings, session.world, state, session.report
        self.root = self.settings.training.output_dir / "checkpoints"
        self.is_async = self.settings.checkpoints.async_checkpointing
        """None until the first save, where no one has asked for either."""
        # Now, since process groups need the store, which is gone when ranks save after their launcher died.
        self.background = BackgroundSaver(self.world) if self.is_async is not False else None
        if self.background is not None:
            state.engine.before_update.append(self.background.finish_copying)
        self.warned = False
        self._tell_duration()

    def save(self, step: int, sampler_state: SamplerState) -> None:
        """Save a checkpoint after the last one is written, and remove the oldest above the limit. Collective.

        Raises EnvironmentNotReady on all ranks when this one, or the last one, cannot be written.
        """
        self.wait()
        self._tell_duration()
        is_full = self.settings.parallel.fsdp_state_dict_type == "FULL_STATE_DICT"
        facts = {"model_family": self.settings.model.model_family, "world_size": self.world.size}
        snapshot = self.state.snapshot(step, sampler_state, facts)
        limit = self.settings.checkpoints.checkpoints_total_limit
        write = partial(save, self.root, full=is_full, keep=limit, choose_best=self.choose_best)
        # At the first save, when EMA and optimizer state are allocated: what is available then is left for
        # copies.
        if self.is_async is None:
            self.is_async = self._copies_fit()
        if self.background is not None and self.is_async:
            self.background.start(snapshot, partial(self._write, write))
        else:
            self._write(write, snapshot, self.world)

    def _write(self, write: Callable[[Snapshot, World], Path], snapshot: Snapshot, world: World) -> Path:
        """Write a snapshot, perhaps in a thread, and measure the waiting after the last step."""
        began = time.monotonic()
        folder = write(snapshot, world)
        seconds = time.monotonic() - began
        if self.is_async:
            self.durations.measured[WRITING].append(seconds)
        exported = len([name for name in snapshot.groups if name in EXPORTED])
        self.durations.estimate(EXPORTING, seconds * exported / len(snapshot.groups))
        return folder

    def _tell_duration(self) -> None:
        """Record the seconds that saving takes, and warn if a machine may be switched off sooner."""
        mirrored = bool(self.settings.checkpoints.mirror_output)
        seconds = {name: self.durations.mean(name) for name in (SAVING, WRITING, *([UPLOADING] * mirrored))}
        self.world.activity.save_seconds = total = sum(seconds.values())
        grace = self.settings.launch.preemption_grace_seconds
        if self.warned or not 0 < grace < total:
            return
        self.warned = True
        parts = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items() if value >= 0.5)
        self.report.warn(
            f"to stop takes about {total:.0f} s ({parts}), but a machine that is taken away lives on for {grace:g} s "
            "after SIGTERM (preemption_grace_seconds): the steps since the last checkpoint would be lost",
            "lower checkpoint_step_interval, or set preemption_grace_seconds to what machines give (0: no warning)",
        )

    def _copies_fit(self) -> bool:
        """Compare the bytes of all groups with half the free memory of the fullest machine. Collective."""
        # Of the ranks of this machine together, each of which copies its own shards.
        copied = self.size_bytes * self.world.local_size // self.world.size
        available = available_bytes()
        fits = [json.loads(text) for text in self.world.gather_texts(json.dumps([copied <= available / 2, available]))]
        # One answer for all ranks: saving is collective.
        if all(enough for enough, _ in fits):
            return True
        least = min(each for _, each in fits)
        self.report.say(
            f"training waits while checkpoints are written: copies of what they hold would take {copied / 1e9:.0f} GB "
            f"of the {least / 1e9:.0f} GB of memory that a machine has available; async_checkpointing=true makes them"
        )
        return False

    @property
    def has_failed(self) -> bool:
        """True if writing has failed in the background; `wait` will raise the error."""
        return self.background is not None and self.background.has_failed

    def wait(self) -> None:
        """Wait until what was saved is on the disk. Raises its error: on all ranks, or a rank is gone."""
        if self.background is not None:
            self.background.wait()

    def close(self) -> None:
        """Let a checkpoint that is being written become complete, whatever ended training."""
        if self.background is not None:
            self.background.close()
            self.background = None
