"""The composition root of one rank: settings in, loop out. The only file that knows everybody."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from simpletuner.checkpoints.export import check_export, check_targets, export_pipeline, finished_steps
from simpletuner.checkpoints.layout import Checkpoint, clear_unfinished
from simpletuner.checkpoints.saving import save
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.data.batch_sampler import SamplerState
from simpletuner.data.prefetch import RankSlice, StepBatch, prefetch
from simpletuner.errors import RemoteFailure, SimpleTunerError, explain_system_errors
from simpletuner.launch.launcher_connection import connect_to_launcher
from simpletuner.launch.node_info import node_info
from simpletuner.launch.rendezvous import Group, verify_same_config
from simpletuner.launch.store import MessageStore, TorchStore, message_signer
from simpletuner.models.family import Family
from simpletuner.models.loading import load_family
from simpletuner.models.weights import weights_files
from simpletuner.parallel.blocks import recommended_blocks
from simpletuner.parallel.compilation import compiler_explained
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.parallel.fsdp2 import units_of
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.same_folder import verify_same_folders
from simpletuner.parallel.world import STALL_SECONDS, joined_world, report_first_failure
from simpletuner.preparation import Plan, Prepared, folders_of, plan_data, prepare
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.deepspeed.config import deepspeed_options
from simpletuner.system.activity import Activity
from simpletuner.system.files import remove, restore_replaced
from simpletuner.system.locks import lock_output_dir, shared_lock
from simpletuner.system.signals import handle_stop_signals
from simpletuner.training.ema import EMA
from simpletuner.training.engines import build_engine
from simpletuner.training.loop import Run, train
from simpletuner.training.metrics import Metrics, metrics_of
from simpletuner.training.optimizers import learning_rate_at, make_optimizer
from simpletuner.training.resuming import (
    base_fingerprints,
    check_fits,
    checkpoint_to_resume,
    data_version,
    has_same_data,
    imported_checkpoint,
    set_later_aside,
    warn_of_changed_base,
    where_to_begin,
)
from simpletuner.training.settings_record import record_settings
from simpletuner.training.state import TrainingState
from simpletuner.training.step import Outcome, take_step
from simpletuner.training.step_logger import StepLogger
from simpletuner.training.summary import print_plan, print_result
from simpletuner.training.validation import Validator, open_validator

PIPELINE, PIPELINE_EMA = "pipeline", "pipeline-ema"


def run_rank(loaded: Loaded) -> None:
    """Run one rank, from joining the others to the exported pipeline."""
    launch, activity = loaded.settings.launch, Activity()
    with (
        handle_stop_signals(lambda: activity.unsaved) as stop,
        connect_to_launcher(os.environ, activity, stop, launch.stall_timeout) as launcher,
        joined_world(os.environ, launch.use_cpu, stop, activity) as world,
        report_first_failure(world, stop, launcher),
        explain_system_errors(),
    ):
        messages = MessageStore(TorchStore(world.store), message_signer(launch.run_secret_file))
        group = Group("rank", world.rank, world.size)
        verify_same_config(messages, group, node_info(loaded), stop.check, STALL_SECONDS)
        session = Session(loaded, world, Report(quiet=not world.is_first), stop)
        with ExitStack() as held:
            open_output(session, held)
            fine_tune(session)


def open_output(session: Session, held: ExitStack) -> None:
    """Lock output_dir and clean up in it on rank 0. Collective: all ranks raise what rank 0 raises."""
    settings, world, error = session.settings, session.world, None
    if world.is_first:
        try:
            with explain_system_errors():
                held.enter_context(
                    lock_output_dir(settings.training.output_dir, session.stop.check, session.report.say)
                )
                clear_leftovers(settings.training.output_dir)
                check_targets(pipelines_of(settings))
        except SimpleTunerError as caught:
            error = caught
    refused = world.gather_texts(json.dumps([error.exit_code, error.message, error.hint]) if error else "")[0]
    if error is not None:
        raise error
    if refused:
        raise RemoteFailure(*json.loads(refused))


def fine_tune(session: Session) -> None:
    """Find the data and train on it; or say that there is nothing left to do."""
    settings, output = session.settings, session.settings.training.output_dir
    quieten_libraries()
    for warning in session.loaded.warnings:
        session.report.warn(warning)
    world, stop = session.world, session.stop.check
    verify_same_folders([("output_dir", output)], world, stop, "output")
    checkpoint = checkpoint_to_resume(session)
    plan = plan_data(session, data_version(checkpoint))
    schedule, _ = where_to_begin(settings, plan, checkpoint)
    done = finished_steps(output / PIPELINE, world) if checkpoint_is_latest(settings) else 0
    if done >= schedule.max_steps:
        session.report.say(f"finished already, after {done} steps; raise max_train_steps or num_train_epochs to go on")
    else:
        caches = folders_of(settings, plan)
        with shared_lock(caches):
            verify_same_folders([("the cache", folder) for folder in caches], world, stop, "caches")
            fine_tune_on(session, plan, checkpoint)
    print_result(output, session.report)


def checkpoint_is_latest(settings: Settings) -> bool:
    """Return whether the run goes on where it was, rather than back or from the start."""
    return settings.checkpoints.resume_from_checkpoint == "latest"


def fine_tune_on(session: Session, plan: Plan, checkpoint: Checkpoint | None) -> None:
    """Encode the data, build the engine, train, export; the caches are locked meanwhile."""
    settings = session.settings
    family = load_family(settings, session.world, session.stop.check)
    check_export(family, pipelines_of(settings))
    check_denoiser(settings, family)
    check_engine(session)
    checkpoint = checkpoint or imported_checkpoint(session, family)
    if checkpoint is not None:
        check_fits(checkpoint, family)
    prepared = prepare(session, plan, family)
    session.world.activity.begin("loading weights", watched=False)
    with closing(open_engine(session, family, checkpoint)) as engine:
        state = open_state(session, family, engine, prepared, checkpoint)
        set_later_aside(session, state.step)
        print_plan(session, family, state, prepared.plan)
        record_settings(session, state.step)
        with metrics_of(settings, state.step, session.world) as metrics, compiler_explained():
            train(compose(session, family, prepared, state, metrics), state.step)
        session.world.activity.begin("writing the pipeline", watched=False)
        export(session, family, state)


def clear_leftovers(output: Path) -> None:
    """Remove what a killed run left unfinished, and finish or undo its renames."""
    clear_unfinished(output / "checkpoints")
    for name in (PIPELINE, PIPELINE_EMA):
        restore_replaced(output / name)
    for path in [*output.glob(".*.unfinished"), *output.glob("validation/**/.*.unfinished")]:
        remove(path)


def pipelines_of(settings: Settings) -> list[Path]:
    """Return where a run exports what it trained: with EMA both averages and weights."""
    names = (PIPELINE, PIPELINE_EMA) if settings.ema.use_ema else (PIPELINE,)
    return [settings.training.output_dir / name for name in names]


def check_denoiser(settings: Settings, family: Family) -> None:
    """Find what is wrong with weights or sharding units before anything is encoded."""
    weights_files(family.folder / family.denoiser_name, settings.model.variant)
    if settings.parallel.fsdp_enable:
        model = family.denoiser()
        units_of(model, recommended_blocks(model), settings.parallel)


def check_engine(session: Session) -> None:
    """Find what is missing for an engine that is not torch's own before anything is encoded."""
    if (zero := deepspeed_options(session.settings)) is not None:
        from simpletuner.deepspeed.readiness import make_ready  # DeepSpeed is optional, and takes seconds

        make_ready(zero, session.world, session.report.say, session.stop.check)


def open_state(
    session: Session, family: Family, engine: Engine, prepared: Prepared, checkpoint: Checkpoint | None
) -> TrainingState:
    """Begin at the start, or restore what a checkpoint holds."""
    settings, plan = session.settings, prepared.plan
    average = EMA(engine, settings.ema) if settings.ema.use_ema else None
    schedule, position = where_to_begin(settings, plan, checkpoint)
    base = base_fingerprints(family)
    state = TrainingState(
        engine, average, family.exported_config(), plan.digest, plan.version, schedule, 0, position, base
    )
    if checkpoint is not None:
        warn_of_changed_base(session, checkpoint, base)
        state.restore(checkpoint, settings, session.report)
        if not has_same_data(plan, checkpoint):
            session.report.warn(
                "pictures or seed changed since the checkpoint: going on at the start of the next epoch"
            )
    return state


def open_engine(session: Session, family: Family, checkpoint: Checkpoint | None) -> Engine:
    """Build the engine with weights from the checkpoint, or else from the base model."""
    settings = session.settings
    folder = checkpoint.folder if checkpoint else family.folder / family.denoiser_name
    files = checkpoint.files("model") if checkpoint else weights_files(folder, settings.model.variant)

    def load_weights(tensors: NamedTensors) -> None:
        """Read this rank's slices."""
        read_tensors(files, tensors, str(folder))

    optimizer = partial(make_optimizer, settings=settings.optimizer)
    model = family.denoiser()
    return build_engine(model, recommended_blocks(model), settings, session.world, load_weights, optimizer)


def compose(session: Session, family: Family, prepared: Prepared, state: TrainingState, metrics: Metrics | None) -> Run:
    """Bind everything that the loop calls."""
    settings, world, plan = session.settings, session.world, prepared.plan
    training, objective, dtype = settings.training, family.objective(), compute_dtype(settings)
    accumulation, dropout = training.gradient_accumulation_steps, settings.data.caption_dropout_probability
    share = RankSlice(world.rank, world.size, accumulation, training.seed, dropout, pin=world.device.type == "cuda")
    painter = open_validator(session, family, state, prepared)

    def step_taken(batches: StepBatch, learning_rate: float) -> Outcome:
        """Train on one step's batches."""
        passes = [batch.to(world.device) for batch in batches.passes]
        clip = settings.optimizer.max_grad_norm
        return take_step(state.engine, family, objective, passes, dtype, learning_rate, clip)

    return Run(
        report=session.report,
        stop=session.stop,
        begin=session.world.activity.begin,
        feed=prefetch(
            prepared.source, plan.order, state.position, state.step, share, settings.data.dataloader_prefetch_qlen
        ),
        take_step=step_taken,
        after_step=state.average.update if state.average is not None else lambda step: None,
        ledger=StepLogger(world, session.stop, metrics, settings.effective_batch_size),
        learning_rate=lambda step: learning_rate_at(step, state.schedule, settings.optimizer),
        draw=partial(draw, painter, metrics),
        has_drawn=painter.has_drawn if painter is not None else lambda step: True,
        save=partial(save_checkpoint, session, state),
        max_steps=state.schedule.max_steps,
        draw_every=settings.validation.validation_step_interval,
        save_every=settings.checkpoints.checkpoint_step_interval,
        seed=training.seed,
    )


def draw(painter: Validator | None, metrics: Metrics | None, step: int) -> None:
    """Draw a round of pictures, and show the grid in the tracker."""
    grid = painter.draw(step) if painter is not None else None
    if grid is not None and metrics is not None:
        metrics.add_picture(grid, step)


def save_checkpoint(session: Session, state: TrainingState, step: int, position: SamplerState) -> None:
    """Save a checkpoint, on all ranks."""
    settings = session.settings
    full = settings.parallel.fsdp_state_dict_type == "FULL_STATE_DICT"
    root, keep = settings.training.output_dir / "checkpoints", settings.checkpoints.checkpoints_total_limit
    facts = {"model_family": settings.model.model_family, "world_size": session.world.size}
    save(root, state.snapshot(step, position, facts), session.world, full, keep)


def export(session: Session, family: Family, state: TrainingState) -> None:
    """Write the trained pipeline, and the averaged one; the plain one last, since it tells that all is done."""
    output, steps = session.settings.training.output_dir, state.schedule.max_steps
    sets = {PIPELINE_EMA: state.average.tensors} if state.average is not None else {}
    for name, weights in {**sets, PIPELINE: state.weights}.items():
        session.report.say(f"writing {output / name}")
        export_pipeline(family, output / name, state.config, weights(), session.world, steps)


def quieten_libraries() -> None:
    """Keep the bars and remarks of libraries off the terminal; errors stay."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    # Flux returns a view, and nothing here writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
