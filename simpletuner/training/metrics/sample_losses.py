"""`sample_losses.jsonl`: loss and timestep of each sample at each step, for `simpletuner runs losses`.

A row per step: bucket, ids, timesteps and losses of the global batch, the same for any number of ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from simpletuner.data.samples.samples import Sample
from simpletuner.errors import naming
from simpletuner.parallel.mesh import Mesh
from simpletuner.run_log import APPEND
from simpletuner.runs.sample_loss_scores import MAX_BYTES, SAMPLE_LOSSES
from simpletuner.system.files.atomic import refuse_special
from simpletuner.system.files.mounts import sync
from simpletuner.system.files.regular_files import open_regular

STEP = re.compile(rb'\{"step": (\d+),')


class SampleLossLog:
    """Gather the losses of a step's samples over the ranks, and append them to the file on rank 0."""

    def __init__(self, mesh: Mesh, output: Path, step: int, samples: Sequence[Sample]) -> None:
        self.mesh, self.path, self.samples, self.file = mesh, output / SAMPLE_LOSSES, samples, None
        if mesh.world.is_first:
            cut_after(self.path, step)
            self.file = os.fdopen(os.open(self.path, APPEND, 0o666), "a", encoding="utf-8")

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
        """Begin to gather timesteps and losses (B each) of a rank's micro batches; nothing waits. Collective.

        The function that is returned waits for (2 x samples of the global batch,) float32.
        """
        own = torch.stack([torch.stack([timesteps.float(), losses.float()]) for timesteps, losses in pairs])
        gathered = self.mesh.world.begin_gather(own)

        def in_order() -> Tensor:
            of_data_ranks = gathered()[:: self.mesh.cp]  # (data ranks, micro batches, 2, B)
            return of_data_ranks.permute(2, 1, 0, 3).flatten()

        return in_order

    def write(self, step: int, numbers: Sequence[int], values: Sequence[float]) -> None:
        """Append a row; `numbers` are those of the global batch's samples."""
        if self.file is None:
            return
        timesteps, losses = (shortest(half) for half in (values[: len(numbers)], values[len(numbers) :]))
        samples = [self.samples[number] for number in numbers]
        ids, bucket = [each.id for each in samples], str(samples[0].shape)  # of which a global batch has one
        row = {"step": step, "bucket": bucket, "ids": ids, "timesteps": timesteps, "losses": losses}
        with naming(self.path):
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()  # so that a checkpoint never has steps that a killed run has not written here

    def sync(self) -> None:
        if self.file is not None:
            with naming(self.path):
                sync(self.file.fileno())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def shortest(values: Sequence[float]) -> list[float]:
    """Return float32 values as the float64 values with the fewest digits that are rounded to them."""
    return [float(str(value)) for value in np.array(values, dtype=np.float32)]


def cut_after(path: Path, step: int) -> None:
    """Cut a file after the rows up to a step, and before a torn one; all of a run that begins again.

    A line that this version cannot read stays.
    """
    refuse_special(path)
    if not path.exists():
        return
    end = 0
    with open_regular(path, MAX_BYTES) as file:
        for line in file:
            found = STEP.match(line)
            if step == 0 or (found and int(found[1]) > step) or not line.endswith(b"\n"):
                break
            end += len(line)
    if end < path.stat().st_size:
        os.truncate(path, end)
