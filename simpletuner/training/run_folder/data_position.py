"""Position in the data and in the schedule at which a run begins or resumes."""

from __future__ import annotations

import math

from simpletuner.checkpoints.layout import Checkpoint, PositionFields
from simpletuner.data.sampler.batch_sampler import DATA_VERSION, SamplerState
from simpletuner.errors import EnvironmentNotReady
from simpletuner.preparation.plan import Plan
from simpletuner.report import Report
from simpletuner.settings import Settings
from simpletuner.training.optimizers import LearningRate
from simpletuner.training.schedule import Schedule, new_schedule, resumed_schedule, saved_schedule


def resume_point(settings: Settings, plan: Plan, checkpoint: Checkpoint | None) -> tuple[Schedule, SamplerState]:
    """Return the schedule, and where in the data the run starts: at the beginning, or where a checkpoint stopped.

    With other data than the checkpoint's, that is the start of the next epoch.
    """
    sampler, batch_size = plan.sampler, settings.effective_batch_size
    if checkpoint is None:
        return new_schedule(settings, sampler), sampler.start(batch_size)
    position = resumed_position(plan, checkpoint, batch_size)
    return resumed_schedule(settings, sampler, checkpoint.state, position), position


def refuse_other_order(checkpoint: Checkpoint | None) -> None:
    """Raise EnvironmentNotReady for a checkpoint whose position counts in an order that this version does not have."""
    if checkpoint is not None and checkpoint.state["data_version"] != DATA_VERSION:
        raise EnvironmentNotReady(
            f"{checkpoint.folder} counts in another order of images than this version of simpletuner takes",
            f"go on with simpletuner {checkpoint.state.get('simpletuner', '')}, or begin with another output_dir",
        )


def has_same_data(plan: Plan, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint's sampler state refers to the data of this plan."""
    return checkpoint.state["data"] == plan.digest


def warn_of_changed_data(report: Report, plan: Plan, checkpoint: Checkpoint) -> None:
    """Warn where a run does not go on at the position that the checkpoint holds."""
    if not has_same_data(plan, checkpoint):
        report.warn("images or seed changed since the checkpoint: going on at the start of the next epoch")


def warn_of_other_rate(report: Report, settings: Settings, schedule: Schedule, checkpoint: Checkpoint) -> None:
    """Warn where the learning rate jumps, since its schedule has another length than at the checkpoint.

    A rate that another setting changed is in the table of changes.
    """
    step, before, optimizer = checkpoint.step, saved_schedule(checkpoint.state), settings.optimizer
    # Of a run that had ended its last step's: the rate after it is never used.
    then = LearningRate(before, optimizer).at(min(step, before.max_steps - 1))
    now = LearningRate(schedule, optimizer).at(step)
    if before != schedule and not math.isclose(then, now, rel_tol=1e-6):
        report.warn(
            f"the learning rate jumps from {then:.3g} to {now:.3g} after step {step}: "
            f"lr_scheduler={optimizer.lr_scheduler} was to end at step {before.max_steps}, and now ends at step "
            f"{schedule.max_steps}",
            "where that is not wanted, begin a new run from what this one has exported",
        )


def resumed_position(plan: Plan, checkpoint: Checkpoint, batch_size: int) -> SamplerState:
    """Return the state to continue with: the saved one, or for other data the start of the next epoch.

    Raises EnvironmentNotReady for a position that is not in the data, which only damage explains.
    """
    saved, step = PositionFields.model_validate(checkpoint.state["position"]), int(checkpoint.state["step"])
    position = SamplerState(**saved.model_dump(), step=step)
    if not has_same_data(plan, checkpoint):
        return plan.sampler.start(batch_size, position.epoch + 1, step)
    if not plan.sampler.contains(position):
        raise EnvironmentNotReady(
            f"{checkpoint.folder} is damaged: there is no batch {position.batch} in epoch {position.epoch}",
            "take an earlier one with --resume_from_checkpoint",
        )
    return plan.sampler.with_batch_size(position, batch_size)
