"""Settings that are `auto` until a run knows its model, its data and its devices.

`gradient_checkpointing=auto` recomputes as little as fits, by bytes that are counted before training;
`dynamo_backend=auto` compiles where the steps of a run outweigh the time that the compiler takes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch

from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.completeness import checked_facts, read_note
from simpletuner.parallel.fsdp2 import units_by_class
from simpletuner.parallel.gpu import GIB
from simpletuner.parallel.parallelize import described
from simpletuner.parallel.world import World
from simpletuner.preparation.plan import Plan, samples_by_shape
from simpletuner.session import Session
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.numbers import count_noun
from simpletuner.system.processes.host_memory import available_bytes

# Of the memory that is free: a rehearsed step has its peak within 10 % of the estimate (test_rehearsal.py),
# and torch's allocator leaves gaps between tensors. Not measured on a GPU.
USABLE = 0.9

# Taken of a GPU after its free memory is read: buffers of NCCL's communicators, workspaces of cuBLAS and
# cuDNN. Not measured.
LATER_BYTES = 600 * 2**20

KEPT, RECOMPUTED = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}

# Folder in the user's home with the bytes of each choice, so that later starts, of other runs too, need not
# count them: a trace took 0.7 of the 4.4 CPU s of a new run of the tiny SDXL.
NOTES = "memory"
# Settings by which the bytes may change, but for those of `model`.
DECIDE = {
    "training": True,
    "optimizer": True,
    "ema": True,
    "parallel": True,
    "compile": True,
    "launch": {"num_processes", "num_machines", "use_cpu"},
    "checkpoints": {"async_checkpointing"},
}
DECIDE_NOTHING = {
    "training": {"output_dir", "continue_with_other_data", "seed", "max_train_steps", "num_train_epochs"},
    "optimizer": {"learning_rate", "lr_scheduler", "lr_warmup_steps", "lr_end", "lr_power"},
}


def with_training(settings: Settings, values: Mapping[str, object]) -> Settings:
    return settings.model_copy(update={"training": settings.training.model_copy(update=values)})


def resolve_recomputation(session: Session, family: ModelFamily, plan: Plan) -> tuple[Session, str]:
    """Session with a choice in place of `auto`, and what the start table says of it. Collective."""
    settings, world = session.settings, session.world
    if settings.training.gradient_checkpointing is not None:
        return session, ""
    if settings.training.activation_memory_budget is not None:
        chosen, said = {"gradient_checkpointing": True}, ""
    else:
        world.activity.begin("counting activations", watched=False)
        limit = min(map(int, world.gather_texts(str(free_bytes(world)))))
        largest = max(samples_by_shape(plan), key=attrgetter("pixels"))

        def choose() -> str:
            with counted_before(family, settings, largest) as counted:
                if counted.get(json.dumps(KEPT), math.inf) <= USABLE * limit:
                    return json.dumps((KEPT, counted[json.dumps(KEPT)]))
                from simpletuner.counting.step_memory import Workload
                from simpletuner.training.recomputation import choose_recomputation  # later starts count nothing

                return json.dumps(choose_recomputation(settings, Workload(family, largest), limit, counted))

        chosen, needed = json.loads(world.from_first("recomputation", choose, session.stop.check))
        said = f"about {needed / GIB:,.1f} of {limit / GIB:,.1f} GiB per rank"
    chosen_settings = with_training(settings, chosen)
    return replace(session, loaded=replace(session.loaded, settings=chosen_settings)), said


@contextmanager
def counted_before(family: ModelFamily, settings: Settings, largest: SampleShape) -> Iterator[dict[str, int]]:
    """Yield the bytes of choices from an earlier start, and save the ones added meanwhile."""
    facts = {
        "base": checked_facts(family),
        "shape": str(largest),
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


def note_of(facts: Mapping[str, object]) -> Path:
    """Return the file for a base model, its largest samples and the settings that decide."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return user_home(os.environ) / NOTES / f"{key}.json"


def free_bytes(world: World) -> int:
    """Return the memory that this rank can take: of its GPU, or its share of the machine's."""
    if world.device.type == "cuda":
        from simpletuner.counting.step_memory import CONTEXT_BYTES

        # The context is taken already, and in the estimate.
        return torch.cuda.mem_get_info(world.device)[0] + CONTEXT_BYTES - LATER_BYTES
    return available_bytes() // world.local_size


# Time of inductor for one kind of block and one shape, forward and backward: 1 to 2 minutes are reported for
# the two kinds of blocks of FLUX. Not measured here.
SECONDS_PER_GRAPH = 45

# Per step, at least: of a step of FLUX (8 samples of 1024 px) 0.85 s are expected. Not measured here.
SECONDS_SAVED = 0.25


@dataclass(frozen=True)
class Graphs:
    """Compiled graphs: every kind of block for every shape of a batch's inputs."""

    shapes: int
    kinds: int
    is_limit: bool = False
    """True if this is an upper limit to the number of shapes, since captions have any length."""

    @property
    def seconds(self) -> int:
        return self.shapes * self.kinds * SECONDS_PER_GRAPH

    def __str__(self) -> str:
        kinds = f"{count_noun(self.kinds, 'kind')} of blocks"
        shapes = f"{'up to ' * self.is_limit}{count_noun(self.shapes, 'shape')} of inputs"
        return f"{shapes}: each compiles {kinds} once, about {max(1, round(self.seconds / 60)):,} min in all"


def count_graphs(settings: Settings, family: ModelFamily, plan: Plan) -> Graphs:
    """Count what training compiles; validation and the held-out loss add their own batch sizes."""
    model = family.meta_denoiser
    blocks = units_by_class(model, family.block_classes)
    # Blocks of one class whose weights have equal shapes share a compilation.
    kinds = len({(type(block), tuple(each.shape for each in block.parameters())) for block in blocks})
    if not settings.compile.dynamo_use_regional_compilation:
        kinds = max(1, len(blocks))  # one graph, which takes as long as its blocks
    if settings.compile.dynamo_dynamic:
        return Graphs(1, kinds)
    any_length = family.has_any_text_length
    return Graphs(len(plan.buckets) * ((family.max_length or 1) if any_length else 1), kinds, is_limit=any_length)


def choose_backend(settings: Settings, graphs: Graphs, steps: int, missing: str) -> tuple[str, str]:
    """Backend for a GPU in place of `auto`, and why it is `no`; `missing` is what the compiler lacks."""
    if missing:
        return "no", f"{missing} is missing, which torch.compile needs"
    if settings.parallel.zero_stage == 3:
        return "no", "zero_stage = 3 gathers weights inside the blocks"
    if graphs.seconds > steps * SECONDS_SAVED:
        return "no", f"{graphs}, more than {steps:,} steps save"
    return "inductor", ""


def missing_compiler() -> str:
    """Return the part that inductor lacks to make kernels for a GPU; empty if it is complete."""
    if importlib.util.find_spec("triton") is None:
        return "triton"
    # Triton compiles a launcher in C for its kernels.
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return "" if any(shutil.which(each) for each in compilers if each) else "a C compiler"


def resolve_compiler(session: Session, family: ModelFamily, plan: Plan, steps: int) -> tuple[Session, str]:
    """Session with a backend in place of `auto`, and what the start table says; empty for nothing."""
    settings = session.settings
    is_open = settings.compile.dynamo_backend == "auto"
    if not settings.compile.is_on and not (is_open and session.world.device.type == "cuda"):
        return with_backend(session, "no"), ""  # without building the model that is counted
    reason, graphs = "", count_graphs(settings, family, plan)
    if is_open:
        backend, reason = choose_backend(settings, graphs, steps, missing_compiler())
        session = with_backend(session, backend)
    if session.settings.compile.is_on:
        return session, f"{described(session.settings.compile)}; {graphs}"
    return session, f"no: {reason}"


def with_backend(session: Session, backend: str) -> Session:
    compiled = session.settings.compile.model_copy(update={"dynamo_backend": backend})
    settings = session.settings.model_copy(update={"compile": compiled})
    return replace(session, loaded=replace(session.loaded, settings=settings))


@dataclass(frozen=True)
class Resolved:
    """A session without `auto`, and the reasons for the start table; empty where there was no choice."""

    session: Session
    compiler: str
    recomputation: str


def resolve_auto(session: Session, family: ModelFamily, plan: Plan, steps: int) -> Resolved:
    """Choose the compiler for a run of `steps`, and what its backward pass recomputes. Collective."""
    session, compiler = resolve_compiler(session, family, plan, steps)
    session, recomputation = resolve_recomputation(session, family, plan)
    return Resolved(session, compiler, recomputation)
