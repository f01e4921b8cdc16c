"""Length of a run in steps, and progress of its learning rate schedule across resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler, SamplerState
from simpletuner.errors import DataError
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Optimizer


@dataclass(frozen=True)
class Schedule:
    """The last step, and the epochs that it comes from (None: max_train_steps).

    When the number of steps changes at a resume, with the effective batch or the data, progress continues from what it
    was at `start_step`, so that the learning rate does not jump.
    """

    max_steps: int
    epochs: int | None = None
    start_step: int = 0
    start_progress: float = 0.0
    planned_steps: int = 0
    """The last step as the run began, if it was another: what a warm-up that is a fraction is a fraction of."""

    def warmup_steps(self, optimizer: Optimizer) -> int:
        return optimizer.warmup_steps(self.planned_steps or self.max_steps)

    def progress(self, step: int, warmup_steps: int) -> float:
        """Return the share of the schedule after warm-up that is done before a step, from 0 to 1."""
        # Resumed after the warm-up: progress goes on from where it was, over the steps that are left.
        if self.start_step > warmup_steps:
            done = (step - self.start_step) / max(1, self.max_steps - self.start_step)
            return min(1.0, self.start_progress + (1 - self.start_progress) * done)
        return min(1.0, max(0, step - warmup_steps) / max(1, self.max_steps - warmup_steps))

    def as_json(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        start = {name: getattr(self, name) for name in ("start_step", "start_progress", "planned_steps")}
        return {"max_steps": self.max_steps, "schedule": {"epochs": self.epochs, **start}}


def new_schedule(settings: Settings, sampler: GlobalBatchSampler) -> Schedule:
    """Return the schedule of a new run. Raises DataError when there is nothing to train."""
    training = settings.training
    if training.max_train_steps is not None:
        return Schedule(training.max_train_steps)
    steps = sampler.count_steps(training.num_train_epochs, settings.effective_batch_size)
    if steps == 0:
        raise DataError("there is nothing to train: no bucket fills a batch", "raise num_train_epochs")
    return Schedule(steps, training.num_train_epochs)


def resumed_schedule(
    settings: Settings, sampler: GlobalBatchSampler, saved: Mapping[str, Any], position: SamplerState
) -> Schedule:
    """Return the schedule of a resumed run; `saved` is its checkpoint's state.

    Finished epochs stay finished; what is left of them is counted in steps of the present effective batch.
    """
    training, step = settings.training, int(saved["step"])
    if training.max_train_steps is not None:
        return Schedule(training.max_train_steps)
    before = saved_schedule(saved)
    epochs, total = training.num_train_epochs, step + sampler.count_steps_left(position, training.num_train_epochs)
    if total == before.max_steps:
        return replace(before, epochs=epochs)
    if before.epochs not in (epochs, None):  # the user asked for another length: the schedule stretches over it
        return Schedule(total, epochs)
    progress = before.progress(step, before.warmup_steps(settings.optimizer))
    return Schedule(total, epochs, step, progress, before.planned_steps or before.max_steps)


def saved_schedule(saved: Mapping[str, Any]) -> Schedule:
    """Return the schedule in a checkpoint's state."""
    return Schedule(saved["max_steps"], **saved["schedule"])
