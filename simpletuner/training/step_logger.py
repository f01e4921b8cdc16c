"""The account of steps: the loss over all ranks, whether anyone asked to stop, and how long steps take.

A step's numbers are read one step late, when they are long ready, so that reading them never makes the device wait.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from simpletuner.data.prefetch import StepBatch
from simpletuner.errors import TrainingError
from simpletuner.parallel.world import World
from simpletuner.report import Progress
from simpletuner.system.signals import StopRequest
from simpletuner.training.metrics import Metrics
from simpletuner.training.step import Outcome


@dataclass(frozen=True)
class PendingStep:
    """One step whose numbers have not been read yet."""

    row: dict[str, Any]
    numbers: torch.Tensor
    ids: list[str]


class StepLogger:
    """Keep the account; `metrics` is None on ranks that do not write."""

    def __init__(self, world: World, stop: StopRequest, metrics: Metrics | None, batch_size: int) -> None:
        self.world, self.stop, self.metrics, self.batch_size = world, stop, metrics, batch_size
        self.open: PendingStep | None = None
        self.stop_asked = False
        self.clock = time.perf_counter()

    def restart_clock(self) -> None:
        """Do not count what happened since the last step, such as a save, as training time."""
        self.clock = time.perf_counter()

    def add(self, step: int, outcome: Outcome, batches: StepBatch, row: dict[str, Any], progress: Progress) -> None:
        """Enter a step, and settle the one before."""
        asked = torch.tensor(float(bool(self.stop.signal_number)), device=outcome.loss.device)
        numbers = self.world.all_mean(torch.stack([outcome.loss, asked]))
        numbers = torch.cat([numbers, outcome.grad_norm.reshape(1)])
        ids = [sample for each in batches.micro_batches for sample in each.ids]
        self.settle(progress)
        now = time.perf_counter()
        row["seconds"], self.clock = now - self.clock, now
        self.open = PendingStep({"step": step, "epoch": batches.next_state.epoch, **row}, numbers, ids)

    def settle(self, progress: Progress) -> None:
        """Read the open step's numbers. Raises TrainingError on all ranks when the loss is not a number."""
        if self.open is None:
            return
        entry, self.open = self.open, None
        began = time.perf_counter()
        loss, asked, grad_norm = entry.numbers.tolist()
        seconds = entry.row["seconds"] + time.perf_counter() - began
        self.stop_asked = self.stop_asked or asked > 0
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise TrainingError(
                f"step {entry.row['step']}: loss is {loss}, gradient norm {grad_norm}; "
                f"samples of rank {self.world.rank}: {', '.join(entry.ids)}",
                "lower learning_rate or look at these samples; the same command resumes from the last checkpoint",
            )
        progress.update(entry.row["step"], f"loss {loss:.4f}  {self.batch_size / seconds:.1f} samples/s")
        if self.metrics is not None:
            speed = {"samples_per_second": self.batch_size / seconds, "seconds": seconds}
            self.metrics.write({**entry.row, "loss": loss, "grad_norm": grad_norm, **speed})
