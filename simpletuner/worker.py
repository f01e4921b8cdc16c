"""The composition root of one rank: settings in, loop out. The only file that knows everybody."""

from __future__ import annotations

import os
import warnings
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

from simpletuner.checkpoints.deepspeed import import_dump
from simpletuner.checkpoints.export import export_pipeline, finished_steps
from simpletuner.checkpoints.layout import SET_ASIDE, Checkpoint, chosen, clear_unfinished, opened, set_aside
from simpletuner.checkpoints.saving import save
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.data.feed import Share, StepBatches, feed
from simpletuner.data.order import Position
from simpletuner.files import sole_user_of, write_json
from simpletuner.models.components import weights_files
from simpletuner.models.family import Family
from simpletuner.models.opening import open_family
from simpletuner.ops.activity import Activity
from simpletuner.ops.cache.holds import in_use
from simpletuner.ops.launch.agreement import Seats, agree
from simpletuner.ops.launch.cards import card_of
from simpletuner.ops.launch.heartbeat import beating
from simpletuner.ops.launch.seal import seal_of
from simpletuner.ops.signals import listening
from simpletuner.parallel.blocks import recommended_blocks
from simpletuner.parallel.compilation import compiler_explained
from simpletuner.parallel.fsdp2 import units_of
from simpletuner.parallel.moments import NamedTensors
from simpletuner.parallel.strategy import Strategy, build_strategy, compute_dtype
from simpletuner.parallel.world import STALL_SECONDS, first_to_fail_speaks, joined_world
from simpletuner.preparation import Plan, Prepared, folders_of, plan_data, prepare, steps_to_train
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings, settings_as_json
from simpletuner.settings.zero.config import zero_of
from simpletuner.training.ema import Average
from simpletuner.training.ledger import Ledger
from simpletuner.training.loop import Run, train
from simpletuner.training.metrics import Metrics, metrics_of
from simpletuner.training.optimizers import learning_rate_at, make_optimizer
from simpletuner.training.state import TrainingState, resumed_position
from simpletuner.training.step import Outcome, take_step
from simpletuner.training.summary import conclude, describe
from simpletuner.training.validation import Painter, open_painter


def run_rank(loaded: Loaded) -> None:
    """Be one rank of a run, from joining the others to the exported pipeline."""
    output, launch, activity = loaded.settings.training.output_dir, loaded.settings.launch, Activity()
    with (
        listening(lambda: activity.unsaved) as stop,
        beating(os.environ, activity, stop, launch.stall_timeout) as heart,
        joined_world(os.environ, launch.use_cpu, stop, activity) as world,
        first_to_fail_speaks(world, stop, heart),
    ):
        seats = Seats("rank", world.rank, world.size, seal_of(launch.run_secret_file))
        agree(world.store, seats, card_of(loaded), stop.check, STALL_SECONDS)
        session = Session(loaded, world, Report(quiet=not world.is_first), stop)
        with sole_user_of(output, stop.check, session.report.say) if world.is_first else nullcontext():
            if world.is_first:
                clear_unfinished(output / "checkpoints")
                write_json(output / "settings.json", settings_as_json(loaded))
            fine_tune(session)


def fine_tune(session: Session) -> None:
    """Find the data and train on it; or say that there is nothing left to do."""
    settings, output = session.settings, session.settings.training.output_dir
    quieten_libraries()
    for warning in session.loaded.warnings:
        session.report.warn(warning)
    plan = plan_data(settings, session.report)
    done = finished_steps(output / "pipeline") if settings.checkpoints.resume_from_checkpoint == "latest" else 0
    if done >= steps_to_train(settings, plan.order):
        session.report.say(f"finished already, after {done} steps; raise max_train_steps or num_train_epochs to go on")
        conclude(output, session.report)
        return
    with in_use(folders_of(settings, plan)):
        fine_tune_on(session, plan)
    conclude(output, session.report)


def fine_tune_on(session: Session, plan: Plan) -> None:
    """Encode the data, build the engine, train, export; the caches are held meanwhile."""
    settings = session.settings
    checkpoint = checkpoint_to_resume(session)
    family = open_family(settings, session.world, session.stop.check)
    check_denoiser(settings, family)
    check_engine(session)
    checkpoint = checkpoint or imported_checkpoint(session, family)
    prepared = prepare(session, plan, family)
    session.world.activity.begin("loading weights", watched=False)
    with closing(open_strategy(session, family, checkpoint)) as strategy:
        state = open_state(session, strategy, prepared, checkpoint)
        describe(session, family, state, prepared.plan)
        with metrics_of(settings, state.step, session.world) as metrics, compiler_explained():
            train(compose(session, family, prepared, state, metrics), state.step)
        session.world.activity.begin("writing the pipeline", watched=False)
        export(session, family, state)


def check_denoiser(settings: Settings, family: Family) -> None:
    """Find what is wrong with weights or sharding units before anything is encoded."""
    weights_files(family.folder / family.denoiser_name, settings.model.variant)
    if settings.parallel.fsdp_enable:
        model = family.denoiser()
        units_of(model, recommended_blocks(model), settings.parallel)


def check_engine(session: Session) -> None:
    """Find what is missing for an engine that is not torch's own before anything is encoded."""
    if (zero := zero_of(session.settings)) is not None:
        from simpletuner.parallel.zero.readiness import make_ready  # DeepSpeed is optional, and takes seconds

        make_ready(zero, session.world, session.report.say, session.stop.check)


def open_state(
    session: Session, strategy: Strategy, prepared: Prepared, checkpoint: Checkpoint | None
) -> TrainingState:
    """Begin at the start, or put back what a checkpoint holds."""
    settings, plan = session.settings, prepared.plan
    average = Average(strategy, settings.ema) if settings.ema.use_ema else None
    start = plan.order.start(settings.effective_batch_size)
    state = TrainingState(strategy, average, plan.digest, steps_to_train(settings, plan.order), 0, start)
    if checkpoint is None:
        return state
    state.restore(checkpoint)
    same_data = checkpoint.state["data"] == plan.digest
    if not same_data:
        session.report.warn("pictures or seed changed since the checkpoint: going on at the start of the next epoch")
    state.position = resumed_position(plan.order, checkpoint.state["position"], same_data, start.batch_size)
    return state


def open_strategy(session: Session, family: Family, checkpoint: Checkpoint | None) -> Strategy:
    """Build the engine with weights from the checkpoint, or else from the base model."""
    settings = session.settings
    folder = checkpoint.folder if checkpoint else family.folder / family.denoiser_name
    files = checkpoint.files("model") if checkpoint else weights_files(folder, settings.model.variant)

    def load_weights(tensors: NamedTensors) -> None:
        """Read this rank's slices."""
        read_tensors(files, tensors, str(folder))

    optimizer = partial(make_optimizer, settings=settings.optimizer)
    model = family.denoiser()
    return build_strategy(model, recommended_blocks(model), settings, session.world, load_weights, optimizer)


def compose(session: Session, family: Family, prepared: Prepared, state: TrainingState, metrics: Metrics | None) -> Run:
    """Bind everything that the loop calls."""
    settings, world, plan = session.settings, session.world, prepared.plan
    training, objective, dtype = settings.training, family.objective(), compute_dtype(settings)
    accumulation, dropout = training.gradient_accumulation_steps, settings.data.caption_dropout_probability
    share = Share(world.rank, world.size, accumulation, training.seed, dropout, pin=world.device.type == "cuda")
    painter = open_painter(session, family, state, prepared)

    def step_taken(batches: StepBatches, learning_rate: float) -> Outcome:
        """Train on one step's batches."""
        passes = [batch.to(world.device) for batch in batches.passes]
        clip = settings.optimizer.max_grad_norm
        return take_step(state.strategy, family, objective, passes, dtype, learning_rate, clip)

    return Run(
        report=session.report,
        stop=session.stop,
        begin=session.world.activity.begin,
        feed=feed(
            prepared.source, plan.order, state.position, state.step, share, settings.data.dataloader_prefetch_qlen
        ),
        take_step=step_taken,
        after_step=state.average.update if state.average is not None else lambda step: None,
        ledger=Ledger(world, session.stop, metrics, settings.effective_batch_size),
        learning_rate=lambda step: learning_rate_at(step, state.max_steps, settings.optimizer),
        draw=partial(draw, painter, metrics),
        save=partial(save_checkpoint, session, state),
        max_steps=state.max_steps,
        draw_every=settings.validation.validation_step_interval,
        save_every=settings.checkpoints.checkpoint_step_interval,
        seed=training.seed,
    )


def draw(painter: Painter | None, metrics: Metrics | None, step: int) -> None:
    """Draw a round of pictures, and show the grid in the tracker."""
    grid = painter.draw(step) if painter is not None else None
    if grid is not None and metrics is not None:
        metrics.add_picture(grid, step)


def save_checkpoint(session: Session, state: TrainingState, step: int, position: Position) -> None:
    """Save a checkpoint, on all ranks."""
    settings = session.settings
    full = settings.parallel.fsdp_state_dict_type == "FULL_STATE_DICT"
    root, keep = settings.training.output_dir / "checkpoints", settings.checkpoints.checkpoints_total_limit
    facts = {"model_family": settings.model.model_family, "world_size": session.world.size}
    save(root, state.snapshot(step, position, facts), session.world, full, keep)


def export(session: Session, family: Family, state: TrainingState) -> None:
    """Write the trained pipeline, and one with the averaged weights; the first is last, since it marks the end."""
    output, steps = session.settings.training.output_dir, state.max_steps
    sets = {"pipeline-ema": state.average.tensors} if state.average is not None else {}
    for name, weights in {**sets, "pipeline": state.weights}.items():
        export_pipeline(family, output / name, state.config(), weights(), session.world, steps)


def checkpoint_to_resume(session: Session) -> Checkpoint | None:
    """Return the checkpoint that the settings ask for, or the newest complete one."""
    root = session.settings.training.output_dir / "checkpoints"
    checkpoint, passed_over = chosen(root, session.settings.checkpoints.resume_from_checkpoint)
    for why in passed_over:
        session.report.warn(f"passed over: {why}")
    if checkpoint is not None:
        session.report.say(f"resuming from {checkpoint.folder}")
    if session.world.is_first and (moved := set_aside(root, checkpoint.step if checkpoint else 0)):
        session.report.warn(f"later checkpoints are set aside in {root / SET_ASIDE}: {', '.join(moved)}")
    return checkpoint


def imported_checkpoint(session: Session, family: Family) -> Checkpoint | None:
    """Return a checkpoint made from one of DeepSpeed's own, if the settings name one."""
    source, world = session.settings.checkpoints.import_deepspeed_checkpoint, session.world
    if source is None:
        return None
    session.report.say(f"importing {source}")
    folder = ""
    if world.is_first:
        shapes = {name: tuple(tensor.shape) for name, tensor in family.denoiser().state_dict().items()}
        root = session.settings.training.output_dir / "checkpoints"
        folder = str(import_dump(source.expanduser(), root, shapes, family.config))
    world.meet("import", session.stop.check)
    return opened(Path(world.gather_texts(folder)[0]))


def quieten_libraries() -> None:
    """Keep the bars and remarks of libraries off the terminal; errors stay."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    # Flux returns a view, and nothing here writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
