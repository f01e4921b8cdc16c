"""Where in the data and in the schedule a run begins or resumes."""

from __future__ import annotations

from simpletuner.checkpoints.layout import Checkpoint, PositionFields
from simpletuner.data.batch_sampler import DATA_VERSION, SamplerState
from simpletuner.errors import EnvironmentNotReady
from simpletuner.preparation import Plan
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.training.schedule import Schedule, new_schedule, resumed_schedule


def resume_point(settings: Settings, plan: Plan, checkpoint: Checkpoint | None) -> tuple[Schedule, SamplerState]:
    """Return the schedule, and where in the data the run starts: at the beginning, or where a checkpoint stopped.

    With other data than the checkpoint's, that is the start of the next epoch; with another order, of the same one.
    """
    sampler, batch_size = plan.sampler, settings.effective_batch_size
    if checkpoint is None:
        return new_schedule(settings, sampler), sampler.start(batch_size)
    position = resumed_position(plan, checkpoint, batch_size)
    return resumed_schedule(settings, sampler, checkpoint.state, position), position


def data_version(checkpoint: Checkpoint | None) -> int:
    """Return the data version that a run keeps: buckets and order must not change in the middle of it.

    The orders of commits between releases are not kept; such a run goes on with the present one.
    """
    if checkpoint is None or not checkpoint.state["data"]:  # imported: it never had one
        return DATA_VERSION
    return 1 if saved_version(checkpoint) == 1 else DATA_VERSION


def saved_version(checkpoint: Checkpoint) -> int:
    return int(checkpoint.state.get("data_version", 1))


def has_same_order(plan: Plan, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint's sampler state counts in the order of this plan; imported ones have none."""
    return not checkpoint.state["data"] or saved_version(checkpoint) == plan.version


def has_same_data(plan: Plan, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint's sampler state refers to the data of this plan."""
    return checkpoint.state["data"] == plan.digest


def warn_of_changed_data(session: Session, plan: Plan, checkpoint: Checkpoint) -> None:
    """Warn where a run does not go on at the position that the checkpoint holds."""
    if not has_same_order(plan, checkpoint):
        session.report.warn(
            "the checkpoint is of a development version with another order of images: its epoch starts over"
        )
    elif not has_same_data(plan, checkpoint):
        session.report.warn("images or seed changed since the checkpoint: going on at the start of the next epoch")


def resumed_position(plan: Plan, checkpoint: Checkpoint, batch_size: int) -> SamplerState:
    """Return the state to continue with: the saved one, the start of the next epoch for other data, or that of the
    same epoch for another order.

    Raises EnvironmentNotReady for a position that is not in the data, which only damage explains.
    """
    # Other versions wrote keys that no longer mean anything.
    saved, step = PositionFields.model_validate(checkpoint.state["position"]), int(checkpoint.state["step"])
    position = SamplerState(**saved.model_dump(), step=step)
    if not has_same_order(plan, checkpoint):
        return plan.sampler.start(batch_size, position.epoch, step)
    if not has_same_data(plan, checkpoint):
        return plan.sampler.start(batch_size, position.epoch + 1, step)
    if not plan.sampler.contains(position):
        raise EnvironmentNotReady(
            f"{checkpoint.folder} is damaged: there is no batch {position.batch} in epoch {position.epoch}",
            "take an earlier one with --resume_from_checkpoint",
        )
    return plan.sampler.with_batch_size(position, batch_size)
