"""The training loop: next batch, one step, account, save when due, draw when due, stop when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from simpletuner.data.batch_sampler import SamplerState
from simpletuner.data.prefetch import StepBatch
from simpletuner.report import Report
from simpletuner.system.signals import StopRequest
from simpletuner.training.step import Outcome
from simpletuner.training.step_logger import StepLogger


@dataclass(frozen=True)
class Run:
    """What the loop calls. `draw`, `has_drawn` and `save` are collective; `seed` is for dropout inside a model."""

    report: Report
    stop: StopRequest
    begin: Callable[..., None]
    feed: Iterator[StepBatch]
    take_step: Callable[[StepBatch, float], Outcome]
    after_step: Callable[[int], None]
    ledger: StepLogger
    learning_rate: Callable[[int], float]
    draw: Callable[[int], None]
    has_drawn: Callable[[int], bool]
    save: Callable[[int, SamplerState], None]
    max_steps: int
    draw_every: int
    save_every: int
    seed: int


def train(run: Run, step: int) -> None:
    """Train from `step` to `max_steps`. Raises Stopped, after saving, when a signal asked for it."""
    if step == 0 or (is_draw_due(run, step) and not run.has_drawn(step)):  # killed between its checkpoint and images
        run.begin(f"drawing pictures at step {step}", watched=False)
        run.draw(step)
    with run.report.progress("training", run.max_steps, step) as progress:
        run.ledger.restart_clock()
        while step < run.max_steps:
            began = time.perf_counter()
            run.begin(f"reading the batch of step {step + 1}", unsaved=True)
            batches = next(run.feed)
            waited = time.perf_counter() - began
            seed_dropout(run.seed + step)
            learning_rate = run.learning_rate(step)
            run.begin(f"step {step + 1}", unsaved=True)
            outcome = run.take_step(batches, learning_rate)
            step += 1
            run.after_step(step)
            run.ledger.add(step, outcome, batches, {"learning_rate": learning_rate, "data_seconds": waited}, progress)
            is_last = step == run.max_steps
            save_due = is_last or step % run.save_every == 0 or run.ledger.stop_asked
            draw_due = is_draw_due(run, step)
            if save_due or draw_due:
                run.ledger.settle(progress)  # a loss that is not a number is found before it is saved
            if save_due:
                run.begin(f"saving step {step}", unsaved=True, watched=False)
                run.save(step, batches.next_state)
            if run.ledger.stop_asked and save_due:
                raise run.stop.stopped(f"at step {step}; its checkpoint is saved")
            if draw_due:
                run.begin(f"drawing pictures at step {step}", unsaved=not save_due, watched=False)
                run.draw(step)
            if save_due or draw_due:
                run.ledger.restart_clock()


def is_draw_due(run: Run, step: int) -> bool:
    """Return whether validation images belong to a step."""
    return step == run.max_steps or step % run.draw_every == 0


def seed_dropout(seed: int) -> None:
    """Let dropout, where a model has it, repeat itself on resume; torch.manual_seed would take 0.8 ms per step."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
