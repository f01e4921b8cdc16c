"""Families whose sequences are split over ranks, in turn in one process group, beside the same run with whole ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import opened, prepared_by, settings_of, steps_of, whole, write
from torch._dynamo.utils import counters

from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation import Prepared


def compare_in_turn(cases: list[dict[str, Any]], report: str) -> None:
    """Train each case, and write its losses and how far its gradients are from those of its family's first case."""
    with joined_world() as joined:
        taken: dict[str, Any] = {}
        prepared: dict[str, Prepared] = {}
        expected: dict[str, dict[str, torch.Tensor]] = {}
        for case in cases:
            family = case["family"]
            world = replace(joined, store=dist.PrefixStore(family, joined.store))
            settings = settings_of(case, case["engine"], Path(case["folder"]) / case["label"], world.size)
            if family not in prepared:
                prepared[family] = prepared_by(world, settings)
            losses, gradients = first_steps(world, settings, prepared[family], case["steps"])
            expected.setdefault(family, gradients)
            taken[case["label"]] = [losses, largest_difference(gradients, expected[family]), compiled_graphs()]
        write(taken, report, joined)


def compiled_graphs() -> int:
    """Return how many graphs the compiler has made since the last call."""
    made = counters["stats"]["unique_graphs"]
    counters.clear()
    torch.compiler.reset()
    return made


def first_steps(
    world: World, settings: Any, prepared: Prepared, steps: int
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Return (losses and norms, the gradients of the first step), the latter as AdamW's first moment has them."""
    with opened(world, settings, prepared) as (trainer, state):
        first = steps_of(trainer, world, 1)
        moment = state.engine.optimizer_state().tensors["exp_avg"]()
        gradients = {name: whole(tensor).clone() for name, tensor in moment.items()}
        return first + steps_of(trainer, world, steps - 1), gradients


def largest_difference(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a weight's gradient, relative to its norm or to 1e-4 of that of all."""
    assert gradients.keys() == expected.keys()
    least = 1e-4 * torch.stack([each.norm() for each in expected.values()]).norm()
    return max(float((gradients[name] - each).norm() / each.norm().clamp(min=least)) for name, each in expected.items())
