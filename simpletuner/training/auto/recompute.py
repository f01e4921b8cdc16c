"""Resolution of `gradient_checkpointing=auto`: recompute as little as fits, by bytes that are counted before
training."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.checked import facts_of, read_note
from simpletuner.parallel.gpu import GIB
from simpletuner.parallel.model.activations import memory_budget
from simpletuner.parallel.world import World
from simpletuner.preparation.plan import Plan, samples_by_shape
from simpletuner.session import Session
from simpletuner.settings.declared.sections import Settings
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.cache_files import user_home
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

NOTES = "memory"
"""Folder in the user's home with the bytes of each choice, so that later starts, of other runs too, need not count
them: a trace took 0.7 of the 4.4 CPU s of a new run of the tiny SDXL."""
DECIDE = {
    "training": True,
    "optimizer": True,
    "ema": True,
    "parallel": True,
    "compile": True,
    "launch": {"num_processes", "num_machines", "use_cpu"},
    "checkpoints": {"async_checkpointing"},
}
"""Settings by which the bytes may change, but for those of `model`."""
DECIDE_NOTHING = {
    "training": {"output_dir", "continue_with_other_data", "seed", "max_train_steps", "num_train_epochs"},
    "optimizer": {"learning_rate", "lr_scheduler", "lr_warmup_steps", "lr_end", "lr_power"},
}


def choices(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield what may be recomputed, from nothing to all but the inputs of blocks."""
    yield {"gradient_checkpointing": False}
    if settings.compile.is_on:
        yield from ({"gradient_checkpointing": False, "activation_memory_budget": share} for share in BUDGETS)
    yield {"gradient_checkpointing": True}


def choose_recomputation(
    settings: Settings, workload: Workload, limit_bytes: float, counted: dict[str, int] | None = None
) -> tuple[dict[str, Any], int]:
    """Return the first choice that fits, else the last one, and the bytes that a rank takes with it.

    `counted` has the bytes of choices that were counted before, as JSON, and gets those that are counted now.
    """
    counted = {} if counted is None else counted
    chosen, needed = {}, 0
    for chosen in choices(settings):
        name = json.dumps(chosen)
        if name not in counted:
            counted[name] = needed_bytes(with_training(settings, chosen), workload)
        needed = counted[name]
        if needed <= USABLE * limit_bytes:
            break
    return chosen, needed


def needed_bytes(settings: Settings, workload: Workload) -> int:
    memory = estimate_training(settings, workload)
    if settings.launch.use_cpu:  # one memory for both
        return memory.gpu_bytes + memory.host_bytes // memory.inputs.ranks_per_machine
    return memory.gpu_bytes


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
            with counted_before(family, settings, workload) as counted:
                return json.dumps(choose_recomputation(settings, workload, limit, counted))

        chosen, needed = json.loads(world.from_first("recomputation", choose, session.stop.check))
        said = f"about {needed / GIB:,.1f} of {limit / GIB:,.1f} GiB per rank"
    chosen_settings = with_training(settings, chosen)
    return replace(session, loaded=replace(session.loaded, settings=chosen_settings)), said


@contextmanager
def counted_before(family: ModelFamily, settings: Settings, workload: Workload) -> Iterator[dict[str, int]]:
    """Yield the bytes of choices that an earlier start has counted, and note those that are added."""
    facts = {
        "base": facts_of(family),
        "shape": str(workload.largest),
        "settings": settings.model_dump(mode="json", include=DECIDE, exclude=DECIDE_NOTHING),
    }
    path = note_of(facts)
    note = read_note(path)
    found = note.get("bytes") if isinstance(note, dict) and note.get("facts") == facts else None
    is_whole = isinstance(found, dict) and all(isinstance(each, int) for each in found.values())
    counted = dict(found) if isinstance(found, dict) and is_whole else {}
    yield counted
    if counted != found:
        with suppress(OSError):  # no reason to end a run
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"facts": facts, "bytes": counted})


def note_of(facts: Mapping[str, Any]) -> Path:
    """Return the file for a base model, its largest samples and the settings that decide."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return user_home(os.environ) / NOTES / f"{key}.json"


def free_bytes(world: World) -> int:
    """Return the memory that this rank can take: of its GPU, or its share of the machine's."""
    if world.device.type == "cuda":
        # The context is taken already, and in the estimate.
        return torch.cuda.mem_get_info(world.device)[0] + CONTEXT_BYTES - LATER_BYTES
    return available_bytes() // world.local_size
