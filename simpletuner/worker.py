"""The composition root of one rank: settings in, loop out. The only file that knows everybody."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor

from simpletuner import __version__
from simpletuner.checkpoints import layout
from simpletuner.checkpoints.export import export_pipeline
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.checkpoints.saving import replace_folder, save
from simpletuner.checkpoints.tensors import read_tensors, write_json
from simpletuner.data.feed import Share, StepBatches, feed
from simpletuner.data.order import Position
from simpletuner.errors import EnvironmentFault, SimpleTunerError, TrainingError
from simpletuner.models.components import downloaded, local_folder, needs_building, weights_files
from simpletuner.models.family import Family, Sampling
from simpletuner.models.registry import family_class
from simpletuner.ops.signals import StopRequest, listening
from simpletuner.parallel.strategy import Strategy, build_strategy, compute_dtype
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation import Prepared, plan_data, prepare, steps_to_train
from simpletuner.report import Report
from simpletuner.settings import Loaded, Settings, settings_as_json
from simpletuner.training.ema import Average
from simpletuner.training.ledger import Ledger
from simpletuner.training.loop import Run, train
from simpletuner.training.metrics import Metrics
from simpletuner.training.optimizers import learning_rate_at, make_optimizer
from simpletuner.training.state import TrainingState, digest_of, resumed_position
from simpletuner.training.step import Outcome, take_step
from simpletuner.training.validation import Painter

FINISHED = "simpletuner.json"
"""Lies in the exported pipeline and says after how many steps it was written."""


def run_rank(loaded: Loaded) -> None:
    """Be one rank of a run, from joining the others to the exported pipeline."""
    with listening() as stop, joined_world() as world, first_to_fail_speaks(world):
        report = Report(quiet=not world.is_first)
        with sole_user_of(loaded.settings.training.output_dir, world):
            fine_tune(loaded, world, report, stop)


def fine_tune(loaded: Loaded, world: World, report: Report, stop: StopRequest) -> None:
    """Prepare the data, build the engine, train, export."""
    settings, output = loaded.settings, loaded.settings.training.output_dir
    quieten_libraries()
    warn_about(settings, report)
    if world.is_first:
        write_json(output / "settings.json", settings_as_json(loaded))
    plan = plan_data(settings, report)
    if finished_steps(output) >= steps_to_train(settings, plan.order):
        report.say(f"finished: {finished_steps(output)} steps; the pipeline is {output / 'pipeline'}")
        report.say("hint: raise max_train_steps or num_train_epochs to train on", style="dim")
        return
    checkpoint = checkpoint_to_resume(settings, report)
    family = open_family(settings, world, stop)
    prepared = prepare(settings, plan, family, world, report, stop.check)
    max_steps = steps_to_train(settings, prepared.plan.order)
    strategy = open_strategy(settings, family, world, checkpoint)
    average = Average(strategy.weights(), settings.ema) if settings.ema.use_ema else None
    digest = digest_of(prepared.plan.buckets, prepared.plan.samples, settings.training.seed)
    facts = {"simpletuner": __version__, "model_family": family.key, "world_size": world.size, "max_steps": max_steps}
    state = TrainingState(strategy, average, digest, facts)
    position = prepared.plan.order.start(settings.effective_batch_size)
    if checkpoint is not None:
        state.restore(checkpoint)
        position = position_of(checkpoint, state, prepared, settings, report)
    step = checkpoint.step if checkpoint is not None else 0
    describe(settings, family, world, state, prepared, step, report)
    with metrics_of(settings, step, world) as metrics:
        run = compose(settings, world, report, stop, family, prepared, state, metrics, position, step, max_steps)
        train(run, step)
    export(settings, family, state, max_steps, world, report)


def compose(
    settings: Settings,
    world: World,
    report: Report,
    stop: StopRequest,
    family: Family,
    prepared: Prepared,
    state: TrainingState,
    metrics: Metrics | None,
    position: Position,
    step: int,
    max_steps: int,
) -> Run:
    """Bind everything that the loop calls."""
    training, objective, dtype = settings.training, family.objective(), compute_dtype(settings)
    share = Share(
        world.rank,
        world.size,
        training.gradient_accumulation_steps,
        training.seed,
        settings.data.caption_dropout_probability,
    )
    painter = open_painter(settings, family, state, world, prepared)

    def step_taken(batches: StepBatches, learning_rate: float) -> Outcome:
        """Train on one step's batches."""
        passes = [batch.to(world.device) for batch in batches.passes]
        return take_step(
            state.strategy, family, objective, passes, dtype, learning_rate, settings.optimizer.max_grad_norm
        )

    def draw(at: int) -> None:
        """Draw a round of pictures, and show the grid in the tracker."""
        grid = painter.draw(at) if painter is not None else None
        if grid is not None and metrics is not None:
            metrics.add_picture(grid, at)

    def save_checkpoint(at: int, where: Position) -> None:
        """Save on all ranks."""
        full = settings.parallel.fsdp_state_dict_type == "FULL_STATE_DICT"
        keep = settings.checkpoints.checkpoints_total_limit
        save(training.output_dir / "checkpoints", state.snapshot(at, where), world, full, keep)

    return Run(
        report=report,
        stop=stop,
        feed=feed(prepared.source, prepared.plan.order, position, step, share, settings.data.dataloader_prefetch_qlen),
        take_step=step_taken,
        after_step=state.average.update if state.average is not None else lambda at: None,
        ledger=Ledger(world, stop, metrics, settings.effective_batch_size),
        learning_rate=lambda at: learning_rate_at(at, max_steps, settings.optimizer),
        draw=draw,
        save=save_checkpoint,
        max_steps=max_steps,
        draw_every=settings.validation.validation_steps,
        save_every=settings.checkpoints.checkpointing_steps,
        seed=training.seed,
    )


@contextmanager
def first_to_fail_speaks(world: World) -> Iterator[None]:
    """Let only the first rank that fails say why; the others leave with the same exit code."""
    try:
        yield
    except SimpleTunerError as error:
        if world.store.add("failures", 1) == 1:
            raise
        raise SystemExit(int(error.exit_code)) from None
    except RuntimeError as error:
        if world.size == 1 or not lost_a_peer(error):
            raise
        time.sleep(20)  # the launcher ends this rank at once, and names the one that died
        raise TrainingError(f"rank {world.rank} lost contact to another rank: {error}") from None


def lost_a_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because another rank went away."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in text or "connection closed by peer" in text


@contextmanager
def sole_user_of(output: Path, world: World) -> Iterator[None]:
    """Hold the run's folder for as long as the run lives. Raises EnvironmentFault when another run holds it."""
    if not world.is_first:
        yield
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        with FileLock(output / ".lock", timeout=0):
            layout.clear_unfinished(output / "checkpoints")
            yield
    except Timeout:
        raise EnvironmentFault(
            f"another run is using {output}", "wait for it, or give this one another --output_dir"
        ) from None


def quieten_libraries() -> None:
    """Keep the bars and remarks of diffusers and transformers off the terminal; errors stay."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def warn_about(settings: Settings, report: Report) -> None:
    """Say what is accepted but deprecated or without effect."""
    if settings.parallel.fsdp_enable and settings.parallel.fsdp_version == 1:
        report.warn("fsdp_version=1 is deprecated: FSDP2 runs instead, with the same checkpoints", "set fsdp_version=2")
    if settings.parallel.fsdp_enable and not settings.parallel.fsdp_cpu_ram_efficient_loading:
        report.warn("fsdp_cpu_ram_efficient_loading=false has no effect: each rank always reads only its own slices")


def finished_steps(output: Path) -> int:
    """Return after how many steps the exported pipeline was written; 0 when there is none."""
    try:
        return int(json.loads((output / "pipeline" / FINISHED).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError):
        return 0


def checkpoint_to_resume(settings: Settings, report: Report) -> Checkpoint | None:
    """Return the checkpoint that the settings ask for, or the newest complete one."""
    root = settings.training.output_dir / "checkpoints"
    checkpoint, passed_over = layout.chosen(root, settings.checkpoints.resume_from_checkpoint)
    for why in passed_over:
        report.warn(f"passed over: {why}")
    if checkpoint is not None:
        report.say(f"resuming from {checkpoint.folder}")
    return checkpoint


def open_family(settings: Settings, world: World, stop: StopRequest) -> Family:
    """Return the model family with its pipeline folder, which the first rank builds or downloads if need be."""
    family, model = family_class(settings.model.model_family), settings.model
    if needs_building(model):
        folder = settings.training.output_dir / f"base-{model.model_family}-tiny"
        if world.is_first and not folder.exists():
            family.build_tiny(layout.unfinished(folder))
            replace_folder(layout.unfinished(folder), folder)
    else:
        folder = local_folder(model) or (downloaded(model) if world.is_first else None)
    world.meet("base model", stop.check)
    return family(folder or downloaded(model), settings)


def open_strategy(settings: Settings, family: Family, world: World, checkpoint: Checkpoint | None) -> Strategy:
    """Build the engine with weights from the checkpoint, or else from the base model."""
    if checkpoint is not None:
        files, what = checkpoint.files("model"), str(checkpoint.folder)
    else:
        folder = family.folder / family.denoiser_name
        files, what = weights_files(folder, settings.model.variant), str(folder)

    def load_weights(tensors: Mapping[str, Tensor]) -> None:
        """Read this rank's slices."""
        read_tensors(files, tensors, what)

    return build_strategy(
        family.denoiser(),
        family.blocks,
        settings,
        world,
        load_weights,
        partial(make_optimizer, settings=settings.optimizer),
    )


def position_of(
    checkpoint: Checkpoint, state: TrainingState, prepared: Prepared, settings: Settings, report: Report
) -> Position:
    """Return where in the data the checkpoint left off."""
    same = checkpoint.state["data"] == state.data_digest
    if not same:
        report.warn("the pictures or the seed changed since the checkpoint: going on at the start of the next epoch")
    plan, batch_size = prepared.plan, settings.effective_batch_size
    return resumed_position(plan.order, plan.buckets, checkpoint.state["position"], same, batch_size)


@contextmanager
def metrics_of(settings: Settings, step: int, world: World) -> Iterator[Metrics | None]:
    """Open the files that tell how the run goes, on the first rank; close them however it ends."""
    if not world.is_first:
        yield None
        return
    output, tracked = settings.training.output_dir, settings.logging.report_to == "tensorboard"
    metrics = Metrics(output, step, (settings.logging.logging_dir or output / "logs") if tracked else None)
    try:
        yield metrics
    finally:
        metrics.close()


def open_painter(
    settings: Settings, family: Family, state: TrainingState, world: World, prepared: Prepared
) -> Painter | None:
    """Return what draws validation pictures, or None without prompts."""
    validation = settings.validation
    if not validation.validation_prompt:
        return None
    negative = prepared.source.no_caption
    if validation.validation_negative_prompt:
        negative = prepared.text.read(validation.validation_negative_prompt)
    seed = settings.training.seed if validation.validation_seed is None else validation.validation_seed
    sampling = Sampling(
        picture_size(settings), validation.validation_num_inference_steps, validation.validation_guidance, seed
    )
    averaged = {"none": ("trained",), "ema_only": ("ema",), "comparison": ("trained", "ema")}[validation.ema_validation]
    return Painter(
        family=family,
        strategy=state.strategy,
        world=world,
        vae=family.vae(world.device),
        average=state.average,
        variants=averaged if state.average is not None else ("trained",),
        prompts=[(prompt, prepared.text.read(prompt)) for prompt in validation.validation_prompt],
        negative=negative,
        sampling=sampling,
        dtype=compute_dtype(settings),
        folder=settings.training.output_dir / "validation",
    )


def picture_size(settings: Settings) -> tuple[int, int]:
    """Return the validation pictures' (width, height) in px."""
    wish = settings.validation.validation_resolution
    if wish:
        width, _, height = wish.partition("x")
        return int(width), int(height or width)
    data = settings.data
    edge = data.resolution if data.resolution_type != "area" else (data.resolution * 1_000_000) ** 0.5
    side = max(1, round(edge / data.aspect_bucket_alignment)) * data.aspect_bucket_alignment
    return side, side


def describe(
    settings: Settings, family: Family, world: World, state: TrainingState, prepared: Prepared, step: int, report: Report
) -> None:
    """Say what is about to run."""
    parallel, training = settings.parallel, settings.training
    parameters = sum(parameter.numel() for parameter in state.strategy.module.parameters())
    engine = "FSDP2" if parallel.fsdp_enable else "data-parallel" if world.size > 1 else "plain"
    sizes = ", ".join(f"{name}: {len(items)}" for name, items in prepared.plan.buckets.items())
    batch = f"{training.train_batch_size} x {parallel.num_processes} x {training.gradient_accumulation_steps}"
    rows: list[tuple[str, Any]] = [
        ("model", f"{family.key}, {parameters:,} parameters, {training.mixed_precision} mixed precision"),
        ("engine", f"{engine}, {world.size} rank{'s' * (world.size > 1)} on {world.device.type}"),
        ("pictures", f"{len(prepared.plan.samples)} in {len(prepared.plan.buckets)} buckets ({sizes})"),
        ("effective batch", f"{settings.effective_batch_size} = {batch} (batch x ranks x accumulation)"),
        ("steps", f"{step} to {state.facts['max_steps']}"),
        ("output", training.output_dir),
    ]
    report.table("simpletuner train", rows)


def export(settings: Settings, family: Family, state: TrainingState, steps: int, world: World, report: Report) -> None:
    """Write the trained pipeline, and one with the averaged weights."""
    output, config = settings.training.output_dir, state.config()
    write = partial(export_pipeline, family.folder, denoiser=family.denoiser_name, config=config, world=world, notes={FINISHED: {"steps": steps}})
    if state.average is not None:
        write(output / "pipeline-ema", weights=state.average.weights)
    write(output / "pipeline", weights=state.strategy.weights())
