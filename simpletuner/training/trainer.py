"""The training loop. `docs/step.md` walks through one optimizer step of it, line by line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import torch

from simpletuner.data.prefetch import LATENTS, Batch, StepBatch
from simpletuner.data.sampler.epoch_order import hash_key
from simpletuner.models.family.adapter import without_adapter
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import NoisedLatents, Objective, per_sample
from simpletuner.models.family.streams import noise_streams, predict_streams, stream_losses, weighted_sum
from simpletuner.parallel.engine import Engine
from simpletuner.report import Report
from simpletuner.status_line import Progress, format_seconds
from simpletuner.system.processes.run_status import Activity
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.checkpointer import Checkpointer
from simpletuner.training.ema import EMA
from simpletuner.training.metrics.speed import SAVING, Durations, Pace
from simpletuner.training.optimizers import LearningRate
from simpletuner.training.step_logger import TRAINING, StepLogger, StepOutput, StopVote

if TYPE_CHECKING:
    from simpletuner.training.profiling import StepProfiler

# Of a run on a CPU, which is then seldom meant.
LONG_SECONDS = 3600.0


class EvaluationStopped(Exception):
    """A stop was asked for while an evaluation was running; it is made up for at the next start."""


@dataclass
class Verdict:
    """Wishes of the evaluations so far to the trainer; equal on all ranks."""

    save_at: int = -1
    """The step that is to have a checkpoint, since it is the best so far."""
    ends: bool = False
    """True if training is to end at the present step, as after the last."""


class Evaluation(Protocol):
    """An evaluation (validation images, held-out loss) that runs before the first step, after the last, and
    every `interval` steps (0: never)."""

    @property
    def interval(self) -> int: ...

    @property
    def title(self) -> str: ...

    def count(self, step: int) -> int:
        """Return the amount of work of the next `run`, in the unit of `advance`. Collective."""
        ...

    def run(self, step: int, advance: Callable[[int], None]) -> None:
        """Call `advance` after each piece of work, with the count of all ranks together. Collective.

        All ranks must call it equally often: at a stop it raises EvaluationStopped on all of them.
        """
        ...

    def is_complete(self, step: int) -> bool:
        """True if all results of a step are on disk: a run may have been killed before. Collective."""
        ...


@dataclass(kw_only=True)
class Trainer:
    """Take optimizer steps, and log, save and evaluate between them.

    Every rank runs the same trainer on its own slice of each global batch. Saving, evaluation and the
    engine's step are collective, so everything that decides whether they happen must be equal on all ranks.
    """

    engine: Engine
    family: ModelFamily
    objective: Objective
    batches: Iterator[StepBatch]
    learning_rate: LearningRate
    ema: EMA | None
    logger: StepLogger
    stop_vote: StopVote
    checkpointer: Checkpointer
    evaluations: Sequence[Evaluation]
    """Those whose verdict the others depend on come first."""
    verdict: Verdict = field(default_factory=Verdict)
    answer_request: Callable[[int, Callable[[int], None]], None]
    """Samples, at a step, what was asked for meanwhile. Collective."""
    device: torch.device
    activity: Activity
    stop: StopRequest
    report: Report
    step: int
    """Optimizer steps taken so far."""
    max_steps: int
    checkpoint_every: int
    max_grad_norm: float
    dtype: torch.dtype
    """Compute dtype of the denoiser's input."""
    dropout_seed: int
    """Equal on ranks that share samples, which hold equal activations; different on all others."""
    profiler: StepProfiler | None
    durations: Durations

    def train(self) -> None:
        """Train to `max_steps`.

        Raises Stopped, after saving, when a signal asked for it; TrainingError when the loss is not finite.
        """
        traced = self.profiler.opened() if self.profiler is not None else nullcontext()
        with self.logger.progress(self.report, self.pace, self.step), traced, closing(self.checkpointer):
            self.evaluate_before()
            first = self.step + 1
            while self.step < self.max_steps:
                if self.profiler is not None:
                    self.profiler.begin(self.step + 1)
                batch, data_seconds = self.next_batch()
                began = time.perf_counter()
                output = self.train_step(batch)
                self.step += 1
                if self.step == first and self.device.type == "cpu":
                    self.warn_of_cpu(time.perf_counter() - began)
                if self.ema is not None:
                    self.ema.update(self.step)
                self.logger.log(self.step, output, batch, data_seconds)  # reads the previous step's numbers
                if self.profiler is not None and self.profiler.end(self.step, data_seconds):
                    self.logger.restart_clock()
                self.save_and_evaluate(batch)
            self.activity.begin(f"writing the checkpoint of step {self.step}", unsaved=self.step, watched=False)
            self.checkpointer.wait()

    @cached_property
    def pace(self) -> Pace:
        intervals = {SAVING: self.checkpoint_every, **{each.title: each.interval for each in self.evaluations}}
        return Pace(self.max_steps, intervals, self.durations)

    def evaluate_before(self) -> None:
        """Run evaluations due at step 0, or at the resumed step if the previous run was killed before
        finishing them."""
        for evaluation in self.evaluations:
            if self.step == 0 or (self.is_due(evaluation) and not evaluation.is_complete(self.step)):
                self.evaluate(evaluation)
            self.end_early()
        if self.stop_vote.passed:
            raise self.stop.stopped(f"at step {self.step}; nothing is lost")
        self.logger.restart_clock()

    def warn_of_cpu(self, seconds: float) -> None:
        """Warn, by the first step, of a run that is slow because it is on the CPU."""
        if (left := (self.max_steps - self.step) * seconds) > LONG_SECONDS:
            self.report.warn(
                f"this run is on the CPU: its first step took {format_seconds(seconds)}, so the rest takes about "
                f"{format_seconds(left)}",
                "see `nvidia-smi`, and the settings use_cpu and gpu_ids; Ctrl-C saves and stops",
            )

    def next_batch(self) -> tuple[StepBatch, float]:
        """This rank's micro-batches, which a thread prepares, and the seconds waited for them."""
        step = self.step + 1
        self.activity.begin(f"reading the batch of step {step}", unsaved=step, shown_as=TRAINING)
        began = time.perf_counter()
        # Short where the prefetching thread is ahead; what remains is shown as data wait.
        batch = next(self.batches)
        return batch, time.perf_counter() - began

    def train_step(self, batch: StepBatch) -> StepOutput:
        """Accumulate the gradients of all micro-batches, and update the weights.

        Nothing here waits for the device: kernels are queued while the GPU still computes earlier ones.
        """
        self.activity.begin(f"step {self.step + 1}", unsaved=self.step + 1, shown_as=TRAINING)
        # Set at each step, so that a resumed run has the dropout masks that the undisturbed one had.
        seed_dropout(hash_key(self.dropout_seed, self.step))
        learning_rate = self.learning_rate.at(self.step)
        self.engine.set_learning_rate(learning_rate)
        means, pairs = [], []
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            micro_batch = micro_batch.to(self.device, self.family.host_inputs)
            noised = self.with_base_targets(noise_streams(self.objective, micro_batch), micro_batch)
            with self.engine.micro_batch(number == len(batch.micro_batches)):
                prediction = predict_streams(self.family, self.engine.model, noised, self.dtype, micro_batch)
                losses = stream_losses(prediction, noised, micro_batch.loss_mask)
                losses_B = weighted_sum(losses, self.family.stream_weights)
                loss = losses_B.mean()
                # Micro batches are of equal size, so the mean of their means is the mean over the batch.
                self.engine.backward(loss / len(batch.micro_batches))
            # Without its graph, which would stay in memory until the step ends.
            means.append(loss.detach())
            pairs.append((noised[LATENTS].timesteps, losses_B.detach()))
        grad_norm = self.engine.step(self.max_grad_norm)
        return StepOutput(torch.stack(means).mean(), grad_norm, learning_rate, pairs)

    def with_base_targets(self, noised: dict[str, NoisedLatents], batch: Batch) -> dict[str, NoisedLatents]:
        """Return a micro-batch whose target, of regularisation data, is what the base model predicts."""
        if (is_base := batch.from_base) is None:
            return noised
        # Not through DDP, which would count the forward pass as one with a backward pass to come.
        with torch.no_grad(), self.engine.inference(), without_adapter(self.engine.module):
            base = predict_streams(self.family, self.engine.module, noised, self.dtype, batch)
        return {
            name: replace(
                each,
                target=torch.where(per_sample(is_base, each.target), base[name].to(each.target.dtype), each.target),
            )
            for name, each in noised.items()
        }

    def save_and_evaluate(self, batch: StepBatch) -> None:
        """Do what is due after a step. The last step is always saved, also of a run that stops."""
        is_last = self.step == self.max_steps
        saved = is_last or self.step % self.checkpoint_every == 0 or self.stop_vote.passed
        due = [each.title for each in self.evaluations if self.is_due(each)]
        if not (saved or due or self.stop_vote.asked):
            return
        # The time left counts what is due now, though it has not run.
        self.pace.expect([SAVING] * saved + due)
        self.logger.flush()  # a loss that is not finite must end the run before it is saved
        if saved:
            self.save(batch)
        for evaluation in self.evaluations:
            if self.is_due(evaluation):
                self.evaluate(evaluation, unsaved=0 if saved else self.step)
            if (self.end_early() or self.verdict.save_at == self.step) and not saved:
                self.save(batch)
                saved = True
        if self.stop_vote.asked and self.step < self.max_steps and not self.stop_vote.passed:
            self.sample_on_request(unsaved=0 if saved else self.step)
        self.durations.write()
        if self.stop_vote.passed:
            if not saved:
                self.save(batch)
            self.checkpointer.wait()
            self.activity.begin("stopping")  # nothing is unsaved any more, should Ctrl-C be pressed again
            raise self.stop.stopped(f"at step {self.step}; its checkpoint is saved")
        self.logger.restart_clock()  # what happened since the step is no training time

    def end_early(self) -> bool:
        """Let the present step be the last if an evaluation has said so; those that follow are then due."""
        if self.verdict.ends and self.step:
            self.max_steps = self.step
            self.logger.status.train(self.step, self.step)
        return self.verdict.ends

    def sample_on_request(self, unsaved: int) -> None:
        """Answer one request for an image: the next one waits for the next step. Collective."""
        title = f"sampling what was asked for at step {self.step}"
        self.activity.begin(title, unsaved=unsaved, watched=False)
        with suppress(EvaluationStopped), self.report.progress(title, 1) as progress:
            self.answer_request(self.step, partial(self.advance, progress))
        self.stop_vote.asked = False

    def save(self, batch: StepBatch) -> None:
        self.activity.begin(f"saving step {self.step}", unsaved=self.step, watched=False)
        with self.pace.timed(SAVING):
            self.logger.sync()
            self.checkpointer.save(self.step, batch.next_state)

    def is_due(self, evaluation: Evaluation) -> bool:
        every = evaluation.interval
        return self.step == self.max_steps or bool(every and self.step % every == 0)

    def evaluate(self, evaluation: Evaluation, unsaved: int = 0) -> None:
        """Run an evaluation at this step, unless the run is to stop. Collective."""
        title = f"{evaluation.title} at step {self.step}"
        if self.stop_vote.passed:
            return
        self.activity.begin(title, unsaved=unsaved, watched=False)
        with (
            suppress(EvaluationStopped),
            self.report.progress(title, evaluation.count(self.step)) as progress,
            self.pace.timed(evaluation.title),
        ):
            evaluation.run(self.step, partial(self.advance, progress))

    def advance(self, progress: Progress, done: int) -> None:
        """Show an evaluation's progress. Raises EvaluationStopped when the run is to stop. Collective."""
        progress.update(min(progress.done + done, progress.total))
        self.logger.mesh.world.lease.check_recent()
        if self.stop_vote.poll(self.logger.mesh.world):
            raise EvaluationStopped


def seed_dropout(seed: int) -> None:
    # The same after a resume; torch.manual_seed takes 0.8 ms per step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
