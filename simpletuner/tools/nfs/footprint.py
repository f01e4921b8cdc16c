"""How many bytes a run will write: checkpoints, one of them unfinished, and the exported pipelines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.settings.deepspeed.optimizers import states_of

if TYPE_CHECKING:
    from simpletuner.settings import Settings

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Footprint:
    """What a run writes into its folder: how many checkpoints and pipelines, and the bytes of each."""

    parameters: int
    origin: str
    checkpoints: int
    checkpoint_bytes: int
    pipelines: int
    pipeline_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return all of it; caches and pictures come on top."""
        return self.checkpoints * self.checkpoint_bytes + self.pipelines * self.pipeline_bytes


def footprint_of(settings: Settings, parameters: int, origin: str) -> Footprint:
    """Return what a configured run writes for a denoiser with so many parameters; `origin` says who counted them."""
    copies = 1 + len(states_of(settings)) + settings.ema.use_ema
    return Footprint(
        parameters=parameters,
        origin=origin,
        checkpoints=checkpoints_at_once(settings),
        checkpoint_bytes=parameters * FLOAT32_BYTES * copies,
        pipelines=1 + settings.ema.use_ema,
        pipeline_bytes=parameters * FLOAT32_BYTES,
    )


def checkpoints_at_once(settings: Settings) -> int:
    """Return how many checkpoints lie on disk at most: those that are kept, and the one being written."""
    most, steps = settings.checkpoints.checkpoints_total_limit + 1, settings.training.max_train_steps
    if steps is None:
        return most
    return min(most, math.ceil(steps / settings.checkpoints.checkpoint_step_interval))


def bytes_there(output: Path) -> int:
    """Return the bytes that checkpoints and pipelines of earlier starts already take in a run's folder."""
    folders = [output / "checkpoints", output / "pipeline", output / "pipeline-ema"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)
