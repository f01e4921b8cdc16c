"""Choice of what the backward pass recomputes: as little as fits, by bytes that are counted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from simpletuner.counting.step_memory import Workload, estimate_training, estimate_without_step
from simpletuner.parallel.devices import MemoryEstimate
from simpletuner.settings.declared.sections import Settings
from simpletuner.training.auto import KEPT, RECOMPUTED, USABLE, with_training

BUDGET_STEP = 0.05


def within(budget: float) -> dict[str, Any]:
    return {**KEPT, "activation_memory_budget": budget}


def choose_recomputation(
    settings: Settings, workload: Workload, limit_bytes: float, counted: dict[str, int] | None = None
) -> tuple[dict[str, Any], int]:
    """Return what recomputes least of what fits, else all but the inputs of blocks, and the bytes of a rank.

    `counted` has the bytes of choices that were counted before, as JSON, and gets those that are counted now.
    """
    known, usable = {} if counted is None else counted, USABLE * limit_bytes

    def needed(chosen: Mapping[str, object]) -> int:
        if (name := json.dumps(chosen)) not in known:
            known[name] = needed_bytes(with_training(settings, chosen), workload)
        return known[name]

    if not known and bytes_of(settings, estimate_without_step(settings, workload)) > usable:
        return RECOMPUTED, needed(RECOMPUTED)  # nothing else needs to be traced
    if needed(KEPT) <= usable:
        return KEPT, needed(KEPT)
    least, most = needed(RECOMPUTED), needed(within(1.0))
    # A step's peak is the largest of sums linear in the budget: the line between two lies above it.
    share = min(1.0, (usable - least) / max(1, most - least))
    budget = round(math.floor(share / BUDGET_STEP + 1e-9) * BUDGET_STEP, 2)
    return (within(budget), round(least + budget * (most - least))) if budget > 0 else (RECOMPUTED, least)


def needed_bytes(settings: Settings, workload: Workload) -> int:
    return bytes_of(settings, estimate_training(settings, workload))


def bytes_of(settings: Settings, memory: MemoryEstimate) -> int:
    if settings.launch.use_cpu:  # one memory for both
        return memory.gpu_bytes + memory.host_bytes // memory.inputs.ranks_per_machine
    return memory.gpu_bytes
