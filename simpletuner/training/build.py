"""Build what a run trains with: engine, memory, weights, state (new or from a checkpoint), trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from simpletuner.checkpoints.disk_usage import checkpoint_bytes
from simpletuner.checkpoints.layout import Checkpoint, ChooseStep, no_best
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.data.prefetch import RankSlice, prefetch
from simpletuner.data.sampler.epoch_order import hash_key
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import check_heads
from simpletuner.models.catalog.support import trains_sound
from simpletuner.models.family.adapter import adapter_parameters, base_weights, freeze, measure_lengths
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.weights import weights_files
from simpletuner.models.opening.completeness import warn_of_eight_bits, warn_of_unread
from simpletuner.models.opening.lora_config import check_formats
from simpletuner.models.opening.lora_file import check_lora_init, load_lora, lora_file
from simpletuner.parallel.context.context_parallel import SequencePlan
from simpletuner.parallel.engine import Engine, compute_dtype, warn_of_slow_dtype
from simpletuner.parallel.fsdp2 import fsdp2_engine, units_of
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.model.blocks import block_paths
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.parallelize import ddp_engine, parallelize
from simpletuner.parallel.precision.precision import LoadWeights, precision_of
from simpletuner.parallel.torch_engine import MakeOptimizer, TorchEngine
from simpletuner.preparation.plan import Plan
from simpletuner.preparation.prepare import Prepared
from simpletuner.session import Session
from simpletuner.settings.declared.sections import Settings
from simpletuner.training.checkpointer import Checkpointer, TrainingState
from simpletuner.training.ema import EMA
from simpletuner.training.hooks import RunHook, at_round_ends
from simpletuner.training.metrics.metrics import Metrics
from simpletuner.training.metrics.speed import DURATIONS, Durations, open_throughput
from simpletuner.training.optimizers import LearningRate, engine_of, make_optimizer
from simpletuner.training.run_folder.resuming import (
    ResumePoint,
    base_fingerprints,
    warn_of_changed_data,
    warn_of_other_rate,
)
from simpletuner.training.step_logger import RequestWatcher, StepLogger, StopVote
from simpletuner.training.trainer import Evaluation, Trainer, Verdict

if TYPE_CHECKING:
    from simpletuner.training.alarms import RunAlarms
    from simpletuner.training.metrics.sample_losses import SampleLossLog
    from simpletuner.training.profiling import StepProfiler
    from simpletuner.training.validation.requested_samples import RequestedSamples


def open_state(
    session: Session, family: ModelFamily, engine: Engine, plan: Plan, checkpoint: Checkpoint | None, point: ResumePoint
) -> TrainingState:
    """Return the state of a new run, or restore what a checkpoint holds. Collective."""
    settings, (schedule, sampler_state) = session.settings, point
    state = TrainingState(
        engine=engine,
        ema=EMA(engine, settings.ema) if settings.ema.use_ema else None,
        config=family.exported_config(),
        trained=family.trained_facts(),
        data_digest=plan.digest,
        schedule=schedule,
        step=0,
        sampler_state=sampler_state,
        base_fingerprints=base_fingerprints(family),
    )
    if checkpoint is not None:
        state.restore(checkpoint, settings, session.report)
        warn_of_changed_data(session.report, plan, checkpoint)
        warn_of_other_rate(session.report, settings, schedule, checkpoint)
    return state


def build_trainer(
    session: Session,
    family: ModelFamily,
    prepared: Prepared,
    state: TrainingState,
    metrics: Metrics | None,
    hooks: Sequence[RunHook] = (),
    sample_losses: SampleLossLog | None = None,
) -> Trainer:
    settings, mesh, training = session.settings, session.mesh, session.settings.training
    ahead = settings.data.dataloader_prefetch_qlen
    durations = Durations(training.output_dir / DURATIONS if mesh.world.is_first else None)
    size_bytes = checkpoint_bytes(settings, family.trained_weights)
    checkpointer = Checkpointer(session, state, durations, size_bytes, best_chooser(session, prepared.plan))
    asked = RequestWatcher(training.output_dir).is_asked if mesh.world.is_first else bool
    stop_vote, verdict = StopVote(session.stop, lambda: checkpointer.has_failed, asked), Verdict()
    alarms = cache(partial(open_alarms, session, hooks, family, state, prepared.plan))
    return Trainer(
        engine=state.engine,
        family=family,
        objective=family.objective(),
        batches=prefetch(
            prepared.reader, prepared.plan.sampler, state.sampler_state, state.step, slice_of(session), ahead
        ),
        learning_rate=LearningRate(state.schedule, settings.optimizer),
        ema=state.ema,
        logger=StepLogger(
            mesh,
            stop_vote,
            metrics,
            open_throughput(session, family),
            settings.effective_batch_size,
            session.status,
            sample_losses,
            alarms,
        ),
        stop_vote=stop_vote,
        checkpointer=checkpointer,
        evaluations=[
            *open_evaluations(session, family, state, prepared, metrics, verdict, alarms),
            at_round_ends(settings, [hook.evaluated for hook in hooks]),
        ],
        verdict=verdict,
        answer_request=open_requests(session, family, state, prepared),
        device=mesh.world.device,
        activity=mesh.world.activity,
        stop=session.stop,
        report=session.report,
        step=state.step,
        max_steps=state.schedule.max_steps,
        checkpoint_every=settings.checkpoints.checkpoint_step_interval,
        max_grad_norm=settings.optimizer.max_grad_norm,
        dtype=compute_dtype(settings),
        dropout_seed=hash_key(training.seed, "dropout", mesh.data_rank),
        profiler=open_profiler(session),
        durations=durations,
    )


def slice_of(session: Session) -> RankSlice:
    """Return the part of each batch that this rank reads, and how."""
    settings, mesh = session.settings, session.mesh
    return RankSlice(
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        accumulation=settings.training.gradient_accumulation_steps,
        seed=settings.training.seed,
        reference_dropout=settings.data.reference_dropout_probability,
        masked_loss=settings.data.masked_loss_probability,
        pin=mesh.world.device.type == "cuda",
    )


def open_requests(
    session: Session, family: ModelFamily, state: TrainingState, prepared: Prepared
) -> Callable[[int, Callable[[int], None]], None]:
    """Return what answers requests for images; nothing of it is imported before the first one."""

    @cache
    def answering() -> RequestedSamples:
        from simpletuner.training.validation.requested_samples import RequestedSamples

        return RequestedSamples(session, family, state, prepared)

    def run(step: int, advance: Callable[[int], None]) -> None:
        answering().run(step, advance)

    return run


def open_sample_losses(session: Session, step: int, plan: Plan) -> AbstractContextManager[SampleLossLog | None]:
    """Open what gathers the losses of single samples, on all ranks; None where they are not wanted."""
    if not session.settings.logging.log_sample_losses:
        return nullcontext()
    from simpletuner.training.metrics.sample_losses import SampleLossLog

    return closing(SampleLossLog(session.mesh, session.settings.training.output_dir, step, plan.samples))


def open_alarms(
    session: Session, hooks: Sequence[RunHook], family: ModelFamily, state: TrainingState, plan: Plan
) -> RunAlarms:
    """Open the alarms of a run, on rank 0; they are imported after the first step."""
    from simpletuner.training.alarms import RunAlarms

    zeros = family.zero_gradients()
    return RunAlarms(session, hooks, state.engine.module, plan, state.schedule.max_steps, zeros)


def best_chooser(session: Session, plan: Plan) -> ChooseStep:
    """Return the function that names the best of some checkpoints of a run with a held-out loss."""
    if not len(plan.held_out):
        return no_best
    from simpletuner.runs.health.best_step import best_saved_of

    return partial(best_saved_of, session.settings.training.output_dir)


def open_profiler(session: Session) -> StepProfiler | None:
    """Return the profiler of rank 0; None on other ranks, and without profile_steps."""
    steps = session.settings.logging.profile_steps
    if not steps or not session.world.is_first:
        return None
    from simpletuner.training.profiling import FOLDER, StepProfiler

    folder = session.settings.training.output_dir / FOLDER
    return StepProfiler(steps, folder, session.world.device, session.report)


def open_evaluations(
    session: Session,
    family: ModelFamily,
    state: TrainingState,
    prepared: Prepared,
    metrics: Metrics | None,
    verdict: Verdict,
    alarms: Callable[[], RunAlarms],
) -> list[Evaluation]:
    """Return the evaluations that settings and data ask for: held-out loss, validation images, or none."""
    opened: list[Evaluation] = []
    if len(prepared.plan.held_out):
        from simpletuner.training.validation.held_out import open_held_out_loss

        opened.append(open_held_out_loss(session, family, state, prepared, metrics, verdict, alarms))
    if prepared.validation:
        from simpletuner.training.validation.validator import open_validator

        opened.append(open_validator(session, family, state, prepared, metrics))
    return opened


def check_engine(session: Session, family: ModelFamily) -> None:
    """Raise for what would stop the engine, before encoding: weights, LoRA, sharding units, DeepSpeed."""
    settings = session.settings
    slow = warn_of_slow_dtype(settings, session.world.device)
    for remark in filter(None, (slow, warn_of_unread(family), warn_of_eight_bits(family))):
        session.report.warn(remark)
    if family.adapter is not None:
        if begun := check_lora_init(family):
            session.report.say(begun)
        check_formats(family, family.adapter)
        if settings.lora.assistant_lora:
            from simpletuner.models.opening.assistant_lora import read_assistants

            read_assistants(family)
    precision_of(settings).check(session.world.device)
    if settings.parallel.context_parallel_size > 1:
        check_sequence_plan(family)
    if settings.training.fuse_qkv_projections and not family.fuses_qkv:
        message = f"fuse_qkv_projections: diffusers has no fused attention for {type(family).__name__}"
        raise SettingsError(message, "leave it out: it only changes how fast projections are")
    if settings.parallel.fsdp_enable:
        units_of(family.meta_denoiser, family.block_classes, settings.parallel)
    if settings.parallel.zero_stage is not None:
        from simpletuner.deepspeed.startup import start_deepspeed  # DeepSpeed is optional, and takes seconds to import

        start_deepspeed(settings, session.world, session.report.say, session.stop.check)


def check_sequence_plan(family: ModelFamily) -> None:
    """Raise SettingsError if a family's denoiser cannot be split as the settings ask for."""
    name, config = type(family).__name__, family.exported_config()
    if family.sequence_plan is None:
        raise SettingsError(
            f"{name} cannot be split by context_parallel_size: the family has no `sequence_plan`",
            "leave it out; docs/families.md says how a family is split",
        )
    check_heads(name, config.get("num_attention_heads") or config["n_heads"], family.settings.parallel)


def open_engine(settings: Settings, mesh: Mesh, family: ModelFamily, checkpoint: Checkpoint | None) -> Engine:
    """Build the engine with the weights of the checkpoint, or else of the base model. Collective.

    With a LoRA those of the base are frozen, and a checkpoint holds the adapter alone.
    """
    is_lora = family.adapter is not None
    if checkpoint is not None and not is_lora:
        folder, files = checkpoint.folder, checkpoint.files("model")
    else:
        folder = family.folder / family.denoiser_name
        files = weights_files(folder, settings.model.variant)

    read = partial(read_tensors, files, what=str(folder))
    if is_lora and settings.lora.assistant_lora:
        from simpletuner.models.opening.assistant_lora import read_assistants, read_merged

        read = partial(read_merged, read, deltas=read_assistants(family))

    @torch.no_grad()
    def load_weights(tensors: NamedTensors) -> None:
        read(base_weights(tensors))
        if checkpoint is None and settings.lora.lora_init is None:
            measure_lengths(tensors)

    model = family.denoiser()
    optimizer = partial(make_optimizer, settings=settings.optimizer, blocks=block_paths(model, family.block_classes))
    if is_lora:
        # Still on the meta device: the base is allocated in its final dtype, not converted.
        freeze(model, compute_dtype(settings))
        attach_adapter(family, checkpoint, model)
    return build_engine(model, family.block_classes, settings, mesh, load_weights, optimizer, family.sequence_plan)


def attach_adapter(family: ModelFamily, checkpoint: Checkpoint | None, model: nn.Module) -> None:
    """Insert the LoRA with the weights of the checkpoint, or else of lora_init, or else new ones. Collective.

    Its matrices are whole, in host memory; the base may still be on the meta device.
    """
    assert family.adapter is not None
    family.adapter.attach_new(model)
    tensors, start = (
        {name: each.detach() for name, each in adapter_parameters(model).items()},
        family.settings.lora.lora_init,
    )
    if checkpoint is not None:
        read_tensors(checkpoint.files("model"), tensors, str(checkpoint.folder))
    elif start is not None:
        load_lora(lora_file(start), family, tensors)


def build_engine(
    model: nn.Module,
    blocks: tuple[str, ...],
    settings: Settings,
    mesh: Mesh,
    load_weights: LoadWeights,
    make_optimizer: MakeOptimizer,
    plan: SequencePlan | None = None,
) -> Engine:
    """Wrap a meta denoiser, with its LoRA if any; `load_weights` fills tensors by name. Collective.

    `plan` says where a sequence that ranks share is split.
    """
    precision = precision_of(settings)
    # A precision replaces modules, and a LoRA has added some: all are compiled and sharded alike.
    precision.prepare(model, blocks)
    parallelize(model, blocks, settings, mesh, plan)
    return ENGINES[settings.parallel.engine](model, blocks, settings, mesh, load_weights, make_optimizer)


def build_torch_engine(
    wrap: Callable[..., TorchEngine],
    model: nn.Module,
    blocks: tuple[str, ...],
    settings: Settings,
    mesh: Mesh,
    load_weights: LoadWeights,
    make_optimizer: MakeOptimizer,
) -> TorchEngine:
    """Build the engine that the precision and the optimizer name. Collective.

    Memory comes after sharding, so that no rank ever holds more than its share; weights come before the
    optimizer and DDP, which copy or broadcast them.
    """
    parallel, device = settings.parallel, mesh.world.device
    # FSDP2 refuses offloaded parameters that were not made in host memory.
    parameters_on = torch.device("cpu") if parallel.fsdp_offload_params else device
    stepped_by = engine_of(settings.optimizer.optimizer)
    make_engine = precision_of(settings).load(model, blocks, device, parameters_on, load_weights, stepped_by)
    adapter = adapter_parameters(model) or None
    engine = wrap(model, parallel, mesh, make_optimizer, compute_dtype(settings), adapter, make_engine)
    engine.skips_weights = trains_sound(settings)  # clips without sound give its weights no gradients
    engine.step_as(settings.optimizer)
    return engine


def build_ddp_engine(*arguments: Any) -> Engine:
    wrap = partial(ddp_engine, skips_weights=trains_sound(arguments[2]))
    return build_torch_engine(wrap, *arguments)


def build_zero_engine(*arguments: Any) -> Engine:
    from simpletuner.deepspeed.engine import build_deepspeed_engine  # importing DeepSpeed takes seconds

    return build_deepspeed_engine(*arguments)


ENGINES: Mapping[str, Callable[..., Engine]] = {
    "ddp": build_ddp_engine,
    "fsdp2": partial(build_torch_engine, fsdp2_engine),
    "zero": build_zero_engine,
}
