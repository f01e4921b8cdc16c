"""Bytes that a run writes into its folder: checkpoints and exported pipelines. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.filesize import decimal

from simpletuner.parallel.devices.memory import FLOAT32_BYTES
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.settings.declared.sections import Settings


@dataclass(frozen=True)
class DiskUsage:
    """At most so many checkpoints and pipelines, and the bytes of each."""

    parameters: int
    """Those that are trained."""
    origin: str
    """The source of their number."""
    checkpoints: int
    """Those that are kept, and the one being written."""
    checkpoint_bytes: int
    pipelines: int
    pipeline_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoints * self.checkpoint_bytes + self.pipelines * self.pipeline_bytes

    @property
    def parts(self) -> str:
        checkpoints = f"{self.checkpoints} x {decimal(self.checkpoint_bytes)} of checkpoints"
        return f"{checkpoints}, {self.pipelines} x {decimal(self.pipeline_bytes)} exported"


def estimate_disk_usage(
    settings: Settings, weights: TrainedWeights, origin: str, copied_bytes: int = 0, steps: int | None = None
) -> DiskUsage:
    """Estimate what a run writes.

    `copied_bytes` are those of the base model that a pipeline copies; `steps` are those of the run, where
    max_train_steps does not say it.
    """
    checkpoints, steps = settings.checkpoints.checkpoints_total_limit + 1, settings.training.max_train_steps or steps
    if steps is not None:
        checkpoints = min(checkpoints, math.ceil(steps / settings.checkpoints.checkpoint_step_interval))
    # One file of a LoRA for each program; where the original's layers are stacks, kohya's takes up to three times that.
    files = len(settings.lora.export_format.split(",")) if settings.model.model_type == "lora" else 1
    pipeline = files * FLOAT32_BYTES * weights.num_saved + copied_bytes * (settings.model.model_type == "full")
    each = checkpoint_bytes(settings, weights)
    return DiskUsage(weights.num_parameters, origin, checkpoints, each, 1 + settings.ema.use_ema, pipeline)


def checkpoint_bytes(settings: Settings, weights: TrainedWeights) -> int:
    """Return the bytes of one checkpoint, over all ranks: weights, EMA and moments, all in float32."""
    moments = weights.saved_states(settings.optimizer.optimizer)
    return FLOAT32_BYTES * (weights.num_saved * (1 + settings.ema.use_ema) + moments)
