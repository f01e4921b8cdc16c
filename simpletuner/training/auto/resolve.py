"""Settings that are `auto` until a run knows its model, its data and its devices."""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.models.family.base import ModelFamily
from simpletuner.preparation.plan import Plan
from simpletuner.session import Session
from simpletuner.training.auto.compile import resolve_compiler
from simpletuner.training.auto.recompute import resolve_recomputation


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
