"""Resolution of `dynamo_backend=auto`: compile where the steps of a run outweigh the time that the compiler takes."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, replace

from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.compilation import described
from simpletuner.parallel.fsdp2 import units_by_class
from simpletuner.parallel.model.blocks import recommended_blocks
from simpletuner.preparation.plan import Plan
from simpletuner.session import Session
from simpletuner.settings.declared.sections import Settings
from simpletuner.system.numbers import count_noun

SECONDS_PER_GRAPH = 45
"""Time of inductor for one kind of block and one shape, forward and backward: 1 to 2 minutes are reported for the two
kinds of blocks of FLUX. Not measured here."""

SECONDS_SAVED = 0.25
"""Per step, at least: of a step of FLUX (8 samples of 1024 px) 0.85 s are expected. Not measured here."""


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
    blocks = units_by_class(model, recommended_blocks(model))
    # Blocks of one class whose weights have equal shapes share a compilation.
    kinds = len({(type(block), tuple(each.shape for each in block.parameters())) for block in blocks})
    if not settings.compile.dynamo_use_regional_compilation:
        kinds = max(1, len(blocks))  # one graph, which takes as long as its blocks
    if settings.compile.dynamo_dynamic:
        return Graphs(1, kinds)
    any_length = family.has_any_text_length
    return Graphs(len(plan.buckets) * ((family.max_length or 1) if any_length else 1), kinds, is_limit=any_length)


def choose_backend(settings: Settings, graphs: Graphs, steps: int, missing: str) -> tuple[str, str]:
    """Return the backend for a GPU in place of `auto`, and why it is `no`; `missing` is what the compiler lacks."""
    if missing:
        return "no", f"{missing} is missing, which torch.compile needs"
    if settings.parallel.zero_stage == 3:
        return "no", "zero_stage = 3 gathers weights inside the blocks"
    if graphs.seconds > steps * SECONDS_SAVED:
        return "no", f"{graphs}, more than {steps:,} steps save"
    return "inductor", ""


def missing_compiler() -> str:
    """Return what inductor lacks to make kernels for a GPU; empty where it is all there."""
    if importlib.util.find_spec("triton") is None:
        return "triton"
    # Triton compiles a launcher in C for its kernels.
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return "" if any(shutil.which(each) for each in compilers if each) else "a C compiler"


def resolve_compiler(session: Session, family: ModelFamily, plan: Plan, steps: int) -> tuple[Session, str]:
    """Return the session with a backend in place of `auto`, and what the start table says; empty for nothing."""
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
