"""What a step computes and keeps with each setting that only trades memory and speed, in one process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engines import opened, prepared_by, settings_of, steps_of, write
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.parallel.world import joined_world

STEPS = 2


class KeptBytes(saved_tensors_hooks):
    """Count the bytes that autograd keeps, but for parameters; each memory once."""

    def __init__(self) -> None:
        super().__init__(self.pack, lambda tensor: tensor)
        self.by_address: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, nn.Parameter):
            self.by_address[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self.by_address.values())


def steps_by_variant(arguments: dict[str, Any], variants: dict[str, dict[str, Any]], report: str) -> None:
    """Write, by variant, the losses and norms of some steps, the bytes that the first keeps, and graphs compiled."""
    with joined_world() as world:
        taken, prepared = {}, None
        for label, more in variants.items():
            torch._dynamo.reset()  # blocks of an earlier variant are compiled with its budget
            counters.clear()
            folder = Path(arguments["folder"]) / f"{label}-x{world.size}"
            settings = settings_of(arguments | more, more.get("engine", "whole"), folder, world.size)
            prepared = prepared or prepared_by(world, settings)
            with opened(world, settings, prepared) as (trainer, _):
                with (kept := KeptBytes()):
                    steps = steps_of(trainer, world, 1)
                steps += steps_of(trainer, world, STEPS - 1)
            taken[label] = [steps, kept.total, counters["stats"]["unique_graphs"]]
        write(taken, report, world)
