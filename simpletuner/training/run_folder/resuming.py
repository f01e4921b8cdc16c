"""The checkpoint to resume from, checks that it fits, and its position in data and schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from simpletuner.caches.store.records import file_fingerprint
from simpletuner.checkpoints.layout import SET_ASIDE, Checkpoint, PositionFields, set_aside
from simpletuner.checkpoints.tensors import read_shapes
from simpletuner.checkpoints.verification import Verification, find_newest
from simpletuner.data.sampler.batch_sampler import DATA_VERSION, SamplerState
from simpletuner.errors import EnvironmentNotReady, OtherRunsFolder
from simpletuner.models.family.adapter import Adapter
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.world import World
from simpletuner.preparation.plan import Plan
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.optimizers import LearningRate, Schedule, new_schedule, resumed_schedule, saved_schedule
from simpletuner.training.run_folder.other_project import refuse_other_model

SHOWN = 3


def checkpoint_to_resume(session: Session, damaged: Mapping[Path, str]) -> Checkpoint | None:
    """Checkpoint that the settings ask for, or the newest that is complete and not `damaged`. Collective.

    Raises OtherRunsFolder when it is of another model.
    """
    settings = session.settings
    root, wish = checkpoints_of(settings), settings.checkpoints.resume_from_checkpoint
    # The newest that is complete and not known to be damaged: losing the steps since the one before is better
    # than a run that cannot start, and the damaged one is left for the user to look at.
    checkpoint, passed_over = find_newest(root, wish, session.world, damaged)
    for why in passed_over.values():
        session.report.warn(f"passed over: {why}")
    # Refused before anything is loaded or written: the run in this folder would go on as another model's.
    refuse_other_model(session, checkpoint)
    if checkpoint is not None:
        session.report.say(f"resuming from {checkpoint.folder}")
    return checkpoint


def checkpoints_of(settings: Settings) -> Path:
    return settings.training.output_dir / "checkpoints"


def check_fits(checkpoint: Checkpoint, family: ModelFamily, world: World, verification: Verification | None) -> None:
    """Compare the shapes of a checkpoint's weights with the denoiser's; reads headers only. Collective.

    Raises OtherRunsFolder on all ranks, and CheckpointDamaged if a damaged header resembles another model.
    """
    trained = checkpoint.state.get("denoiser") or family.denoiser_name
    if trained != family.denoiser_name:
        raise OtherRunsFolder(
            f"{checkpoint.folder} holds {trained} of the pipeline, but this run trains {family.denoiser_name}",
            "set the model_flavour of then, or give this run another --output_dir",
        )
    if family.adapter is not None:
        refuse_other_adapter(checkpoint, family.adapter)
    # Ranks read the same headers, but one may fail to: all must raise, or the others wait in the next
    # collective.
    if problem := next(filter(None, world.gather_texts(find_misfit(checkpoint, family))), ""):
        # A flipped bit in a header looks like another model; damage is the better explanation, and starts
        # over with an older checkpoint.
        if verification is not None:
            verification.wait()
        hint = "check pretrained_model_name_or_path, give another --output_dir, or --resume_from_checkpoint=none"
        raise OtherRunsFolder(problem, hint)


def refuse_other_adapter(checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Raise OtherRunsFolder unless a checkpoint's adapter has the settings' rank, alpha and layers."""
    usual = {"lora_type": "lora", "lokr_factor": -1, "assistant_lora": "", "assistant_lora_strength": 1.0}
    held, wants = ({**usual, **each} for each in (checkpoint.state["lora"], adapter.as_settings()))
    for name, wanted in wants.items():
        if (value := held.get(name)) != wanted:
            raise OtherRunsFolder(
                f"{checkpoint.folder} has {name} = {value}, but now it is {wanted}",
                f"set {name}={value}, or give this run another --output_dir, or --resume_from_checkpoint=none",
            )


def find_misfit(checkpoint: Checkpoint, family: ModelFamily) -> str:
    """Describe weights of a checkpoint that do not match the denoiser; empty if all do."""
    wanted = family.trained_shapes()
    try:
        found = read_shapes(checkpoint.files("model"), str(checkpoint.folder))
    except EnvironmentNotReady as error:
        return error.message
    wrong = [
        f"{name} is {found.get(name, 'missing')} in the checkpoint, {wanted.get(name, 'missing')} in the model"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return f"{checkpoint.folder} is of another model: {'; '.join(wrong[:SHOWN])}{more}" if wrong else ""


def base_fingerprints(family: ModelFamily) -> dict[str, str]:
    """Return fingerprints of the base model's files by name, except weights that a resumed run reads from the
    checkpoint: the denoiser's, unless a LoRA is trained."""
    files = [path for path in sorted(family.folder.glob("*/*")) if path.is_file()]
    weights = f"{family.denoiser_name}/"
    names = {path.relative_to(family.folder).as_posix(): path for path in files if path.parent.name in family.index}
    if family.settings.lora.assistant_lora:
        from simpletuner.models.opening.assistant_lora import assistant_files

        names |= {f"assistant_lora {path.name}": path for path in assistant_files(family.settings)}
    return {
        name: file_fingerprint(path)
        for name, path in names.items()
        if family.adapter or not (name.startswith(weights) and path.suffix == ".safetensors")
    }


def warn_of_changed_base(
    report: Report, checkpoint: Checkpoint, state: TrainingState, facts: Mapping[str, str]
) -> None:
    """Warn of base model files that changed since the checkpoint, and of another pipeline's call."""
    proven, now = checkpoint.state.get("proven", {}), dict(facts)
    for name in sorted(proven.keys() & now.keys()):
        if proven[name] != now[name]:
            report.warn(f"{name} was {proven[name]} at the checkpoint, and is {now[name]} now")
    before, sums = checkpoint.state.get("base") or state.base_fingerprints, checkpoint.state.get("base_checksums", {})
    changed = {name for name, _ in before.items() ^ state.base_fingerprints.items()}
    changed |= {name for name, value in state.base_checksums.items() if sums.get(name, value) != value}
    if not changed:
        return
    names = sorted(changed)
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    report.warn(f"the base model changed since the checkpoint: {', '.join(names[:SHOWN])}{more}")


def set_later_aside(session: Session, step: int) -> None:
    # A run that goes back must not mix with them.
    root = checkpoints_of(session.settings)
    # Moved and not removed: going back is the one decision of a start that could lose hours of training.
    session.world.lease.check()
    if session.world.is_first and (moved := set_aside(root, step)):
        session.report.warn(f"later checkpoints are set aside in {root / SET_ASIDE}: {', '.join(moved)}")


ResumePoint = tuple[Schedule, SamplerState]
"""The schedule, and where in the data a run starts."""


def resume_point(settings: Settings, plan: Plan, checkpoint: Checkpoint | None) -> ResumePoint:
    """Schedule, and where in the data the run starts: at the beginning, or where a checkpoint stopped.

    With other data than the checkpoint's, that is the start of the next epoch.
    """
    sampler, batch_size = plan.sampler, settings.effective_batch_size
    if checkpoint is None:
        return new_schedule(settings, sampler), sampler.start(batch_size)
    position = resumed_position(plan, checkpoint, batch_size)
    return resumed_schedule(settings, sampler, checkpoint.state, position), position


def refuse_other_order(checkpoint: Checkpoint | None) -> None:
    """Raise EnvironmentNotReady for a checkpoint's position in an order that this version lacks."""
    if checkpoint is not None and (version := checkpoint.state["data_version"]) != DATA_VERSION:
        raise EnvironmentNotReady(
            f"{checkpoint.folder} was written with data order version {version}; this version reads {DATA_VERSION}",
            f"go on with simpletuner {checkpoint.state.get('simpletuner', '')}, or begin with another output_dir",
        )


def has_same_data(plan: Plan, checkpoint: Checkpoint) -> bool:
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
