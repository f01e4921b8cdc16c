"""Resolution of `gradient_checkpointing=auto`: recompute as little as fits, by bytes that are counted before
training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.gpu import GIB
from simpletuner.parallel.model.activations import memory_budget
from simpletuner.parallel.world import World
from simpletuner.preparation.prepare import Plan, samples_by_shape
from simpletuner.session import Session
from simpletuner.settings.declared.sections import Settings
from simpletuner.system.processes.host_memory import available_bytes
from simpletuner.training.auto.memory_estimate import CONTEXT_BYTES, estimate_training
from simpletuner.training.auto.workload import Workload

# Of the memory that is free: a rehearsed step has its peak within 10 % of the estimate (test_rehearsal.py),
# and torch's allocator leaves gaps between tensors. Not measured on a GPU.
USABLE = 0.9

LATER_BYTES = 600 * 2**20
"""Taken of a GPU after its free memory is read: buffers of NCCL's communicators, workspaces of cuBLAS and cuDNN. Not
measured."""

BUDGETS = (0.75, 0.5, 0.25)


def choices(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield what may be recomputed, from nothing to all but the inputs of blocks."""
    yield {"gradient_checkpointing": False}
    if settings.compile.is_on:
        yield from ({"gradient_checkpointing": False, "activation_memory_budget": share} for share in BUDGETS)
    yield {"gradient_checkpointing": True}


def choose_recomputation(settings: Settings, workload: Workload, limit_bytes: float) -> tuple[dict[str, Any], int]:
    """Return the first choice that fits, else the last one, and the bytes that a rank takes with it."""
    chosen, needed = {}, 0
    for chosen in choices(settings):
        memory = estimate_training(with_training(settings, chosen), workload)
        needed = memory.gpu_bytes
        if settings.launch.use_cpu:  # one memory for both
            needed += memory.host_bytes // memory.inputs.ranks_per_machine
        if needed <= USABLE * limit_bytes:
            break
    return chosen, needed


def with_training(settings: Settings, values: dict[str, Any]) -> Settings:
    return settings.model_copy(update={"training": settings.training.model_copy(update=values)})


def resolve_recomputation(session: Session, family: ModelFamily, plan: Plan) -> tuple[Session, str]:
    """Return the session with a choice in place of `auto`, and what the start table says of it. Collective."""
    settings, world = session.settings, session.world
    if settings.training.gradient_checkpointing is not None:
        return session, ""
    if memory_budget(settings) is not None:
        chosen, said = {"gradient_checkpointing": True}, ""
    else:
        world.activity.begin("counting activations", watched=False)
        limit = min(map(int, world.gather_texts(str(free_bytes(world)))))
        workload = Workload(family, max(samples_by_shape(plan), key=attrgetter("pixels")))

        def choose() -> str:
            return json.dumps(choose_recomputation(settings, workload, limit))

        chosen, needed = json.loads(world.from_first("recomputation", choose, session.stop.check))
        said = f"about {needed / GIB:,.1f} of {limit / GIB:,.1f} GiB per rank"
    chosen_settings = with_training(settings, chosen)
    return replace(session, loaded=replace(session.loaded, settings=chosen_settings)), said


def free_bytes(world: World) -> int:
    """Return the memory that this rank can take: of its GPU, or its share of the machine's."""
    if world.device.type == "cuda":
        # The context is taken already, and in the estimate.
        return torch.cuda.mem_get_info(world.device)[0] + CONTEXT_BYTES - LATER_BYTES
    return available_bytes() // world.local_size
