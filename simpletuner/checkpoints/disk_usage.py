"""Bytes that a run writes into its folder: checkpoints and exported pipelines. No torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from simpletuner.checkpoints.layout import list_checkpoints, parse_step
from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.devices import FLOAT32_BYTES
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.settings.declared.sections import Settings

EXPORTED_BYTES = {"fp32": FLOAT32_BYTES, "bf16": 2, "fp16": 2, "float8": 2}
"""Bytes of an exported weight at most, by export_precision: of a U-Net, float8 leaves convolutions in bf16."""


@dataclass(frozen=True)
class DiskUsage:
    """Upper bounds of checkpoints and pipelines, and the bytes of each."""

    parameters: int
    """Number of trained parameters."""
    origin: str
    """Source of that number."""
    checkpoints: int
    """Checkpoints that are kept, and the one being written."""
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
    """Estimate the disk space of a run.

    `copied_bytes` are copied from the base model by a pipeline; `steps` is used if max_train_steps is not
    set.
    """
    checkpoints, steps = kept_checkpoints(settings) + 1, settings.training.max_train_steps or steps
    if steps is not None:
        checkpoints = min(checkpoints, math.ceil(steps / checkpoint_interval(settings)))
    # One LoRA file per program; with stacked layers in the original, kohya's takes up to three times that.
    files = len(settings.lora.export_format.split(",")) if settings.model.model_type == "lora" else 1
    each_weight = EXPORTED_BYTES[settings.checkpoints.export_precision or "fp32"]
    pipeline = files * each_weight * weights.num_saved + copied_bytes * (settings.model.model_type == "full")
    each = checkpoint_bytes(settings, weights)
    pipelines = 1 + settings.ema.use_ema + settings.checkpoints.export_best
    return DiskUsage(weights.num_parameters, origin, checkpoints, each, pipelines, pipeline)


def kept_checkpoints(settings: Settings) -> int:
    """Return the number of checkpoints that are kept: the newest, and the best where there may be one."""
    is_measured = settings.validation.eval_split > 0 or settings.checkpoints.export_best
    return settings.checkpoints.checkpoints_total_limit + is_measured


def checkpoint_interval(settings: Settings) -> int:
    """Return the least number of steps between checkpoints."""
    intervals = [settings.checkpoints.checkpoint_step_interval]
    if settings.checkpoints.export_best and settings.validation.eval_step_interval:
        intervals.append(settings.validation.eval_step_interval)
    return min(intervals)


@dataclass(frozen=True)
class DiskRoom:
    """Space of a run's folder against what the run has yet to write there."""

    output: Path
    usage: DiskUsage
    free_bytes: int | None
    """Free space; None if the file system does not report it, as some bucket mounts."""
    need_bytes: int
    fitting_limit: int
    """Largest checkpoints_total_limit, below the present one, that fits; 0 if none does."""

    @property
    def problem(self) -> EnvironmentNotReady | None:
        """The error of a run that does not fit; None for enough or unknown space."""
        if self.free_bytes is None or self.need_bytes <= self.free_bytes:
            return None
        said = f"{self.output} has {decimal(self.free_bytes)} free, and this run has yet to write "
        said += f"{decimal(self.need_bytes)} there: at most {self.usage.parts}"
        room = "make room, or give another output_dir"
        fewer = f"--checkpoints_total_limit={self.fitting_limit} fits; or {room}" if self.fitting_limit else room
        return EnvironmentNotReady(said, fewer)


def room_of(settings: Settings, usage: DiskUsage, step: int, steps: int | None) -> DiskRoom:
    """Compare the space of output_dir with the writes of a run from `step` to `steps`."""
    output, limit = settings.training.output_dir, settings.checkpoints.checkpoints_total_limit
    beside = kept_checkpoints(settings) - limit
    nearest = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    state = os.statvfs(nearest)
    # f_bavail, since f_bfree also counts the blocks that are reserved for root.
    free = state.f_bavail * state.f_frsize if state.f_blocks else None
    needs = [bytes_to_write(settings, usage, kept + beside, step, steps) for kept in range(1, limit + 1)]
    fitting = sum(need <= (free or 0) for need in needs[:-1])
    return DiskRoom(output, usage, free, needs[-1], fitting)


def bytes_to_write(settings: Settings, usage: DiskUsage, limit: int, step: int, steps: int | None) -> int:
    """Largest growth of a run folder, in bytes: with one checkpoint more than `limit` while it is written,
    and with pipelines beside the kept checkpoints and the pipelines that they replace."""
    output, interval = settings.training.output_dir, checkpoint_interval(settings)
    present = sum(parse_step(path) <= step for path in list_checkpoints(output / "checkpoints"))
    # The last step has a checkpoint, too.
    to_come = math.ceil(steps / interval) - step // interval if steps is not None else limit + 1
    most, kept = min(limit + 1, present + to_come), min(limit, present + to_come)
    exported = usage.pipelines * usage.pipeline_bytes * (1 + settings.checkpoints.export_single_file)
    return max(0, (most - present) * usage.checkpoint_bytes, (kept - present) * usage.checkpoint_bytes + exported)


def checkpoint_bytes(settings: Settings, weights: TrainedWeights) -> int:
    """Return the bytes of one checkpoint, over all ranks: weights, EMA and moments, all in float32."""
    moments = weights.saved_states(settings.optimizer.optimizer)
    return FLOAT32_BYTES * (weights.num_saved * (1 + settings.ema.use_ema) + moments)
