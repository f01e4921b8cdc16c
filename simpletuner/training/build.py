"""Build what a run trains with: its state, new or from a checkpoint, and the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simpletuner.checkpoints.disk_usage import checkpoint_bytes
from simpletuner.checkpoints.layout import Checkpoint
from simpletuner.data.batches.prefetch import RankSlice, prefetch
from simpletuner.data.sampler.permutation import hash_key
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.preparation.prepare import Prepared
from simpletuner.session import Session
from simpletuner.training.checkpointer import Checkpointer
from simpletuner.training.ema import EMA
from simpletuner.training.metrics.eta import DURATIONS, Durations
from simpletuner.training.metrics.metrics import Metrics
from simpletuner.training.metrics.sample_losses import SampleLossLog
from simpletuner.training.metrics.throughput import open_throughput
from simpletuner.training.optimizers import LearningRate, trained_weights
from simpletuner.training.profiling import open_profiler
from simpletuner.training.run_folder.data_position import resume_point, warn_of_changed_data, warn_of_other_rate
from simpletuner.training.run_folder.resuming import base_fingerprints
from simpletuner.training.state import TrainingState
from simpletuner.training.step_logger import StepLogger, StopVote
from simpletuner.training.trainer import Evaluation, Trainer
from simpletuner.training.validation.callbacks import at_round_ends
from simpletuner.training.validation.held_out import open_held_out_loss
from simpletuner.training.validation.validator import open_validator


def open_state(
    session: Session, family: ModelFamily, engine: Engine, prepared: Prepared, checkpoint: Checkpoint | None
) -> TrainingState:
    """Return the state of a new run, or restore what a checkpoint holds. Collective."""
    settings, plan = session.settings, prepared.plan
    schedule, sampler_state = resume_point(settings, plan, checkpoint)
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
    after_rounds: Sequence[Callable[[int], None]] = (),
    sample_losses: SampleLossLog | None = None,
) -> Trainer:
    """Connect what the training loop works with."""
    settings, mesh, training = session.settings, session.mesh, session.settings.training
    rank_slice = RankSlice(
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        accumulation=training.gradient_accumulation_steps,
        seed=training.seed,
        reference_dropout=settings.data.reference_dropout_probability,
        masked_loss=settings.data.masked_loss_probability,
        pin=mesh.world.device.type == "cuda",
    )
    ahead = settings.data.dataloader_prefetch_qlen
    durations = Durations(training.output_dir / DURATIONS if mesh.world.is_first else None)
    checkpointer = Checkpointer(session, state, durations, checkpoint_bytes(settings, trained_weights(family)))
    stop_vote = StopVote(session.stop, lambda: checkpointer.has_failed)
    return Trainer(
        engine=state.engine,
        family=family,
        objective=family.objective(),
        batches=prefetch(prepared.reader, prepared.plan.sampler, state.sampler_state, state.step, rank_slice, ahead),
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
        ),
        stop_vote=stop_vote,
        checkpointer=checkpointer,
        evaluations=[
            *open_evaluations(session, family, state, prepared, metrics),
            at_round_ends(settings, after_rounds),
        ],
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


def open_evaluations(
    session: Session, family: ModelFamily, state: TrainingState, prepared: Prepared, metrics: Metrics | None
) -> list[Evaluation]:
    """Return what looks at the weights between steps: nothing without held-out images and validation prompts."""
    opened = (
        open_evaluation(session, family, state, prepared, metrics)
        for open_evaluation in (open_held_out_loss, open_validator)
    )
    return [each for each in opened if each is not None]
