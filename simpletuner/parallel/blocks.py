"""Which parts of a denoiser are worth gathering, freeing, recomputing and compiling as one: its repeated blocks.

A block is a class with modules inside that stands at least twice in one ModuleList. Blocks contain one another (a
U-Net's CrossAttnUpBlock2D holds Transformer2DModels, which hold BasicTransformerBlocks); units may not. So of all sets
of blocks in which none contains another, the one is taken that holds the most of the model. Only names and shapes are
looked at: the model may be on the meta device, and this file needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpletuner.parallel.module_stats import (
    CONTAINERS,
    ClassStats,
    class_stats,
    is_block,
    parameters_of,
    parameters_outside,
)

if TYPE_CHECKING:
    from torch import nn

LARGEST_SHARES = (1 / 20, 1 / 10, 1 / 5, 1)
"""How much of the model one unit may be: what one all-gather brings in has to fit beside everything else, twice when
the next one is prefetched. The published transformers have blocks of 1 to 5 %; the first bound is taken under which
units hold ENOUGH."""

ENOUGH = 0.95
"""Share of the model that units should hold; the rest is gathered with the root and stays for the whole pass."""

SMALLEST_SHARE = 1 / 500
"""Blocks of which even the largest is less of the model than this stay outside: each gathering costs its latency."""

PATHS_SHOWN = 3


@dataclass(frozen=True)
class BlockClass:
    """All modules of one class in a denoiser, and whether each should be a unit. `largest` counts the parameters of
    the largest module, `lists` are the ModuleLists in which it repeats (`*`: any number), `is_block` says that it could
    be a unit, `no_split` and `repeated` are the hints of diffusers' `_no_split_modules` and `_repeated_blocks`."""

    class_name: str
    count: int
    parameters: int
    share: float
    largest: int
    sample_paths: tuple[str, ...]
    lists: tuple[str, ...]
    is_block: bool
    no_split: bool
    repeated: bool
    recommended: bool
    reason: str


@dataclass(frozen=True)
class Blocks:
    """A denoiser by classes: the recommended ones first, then by parameters. `outside` are the parameters that no unit
    holds, by path."""

    total_parameters: int
    classes: tuple[BlockClass, ...]
    recommended: tuple[str, ...]
    outside: Mapping[str, int]


def recommended_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the classes that should become sharding units, those with the most parameters first."""
    return chosen(class_stats(model), parameters_of(model))


def blocks_of(model: nn.Module) -> list[str]:
    """Return the classes that could become sharding units."""
    return sorted(name for name, kind in class_stats(model).items() if is_block(name, kind))


def detect_blocks(model: nn.Module) -> Blocks:
    """Return what a denoiser consists of, and which of it should become sharding units."""
    kinds, total = class_stats(model), parameters_of(model)
    taken = chosen(kinds, total)
    hints = [set(getattr(model, name, None) or ()) for name in ("_no_split_modules", "_repeated_blocks")]

    def block_class(name: str) -> BlockClass:
        """Return what is said of one class."""
        kind = kinds[name]
        return BlockClass(
            class_name=name,
            count=len(kind.paths),
            parameters=kind.parameters,
            share=kind.parameters / max(1, total),
            largest=kind.largest,
            sample_paths=tuple(kind.paths[:PATHS_SHOWN]),
            lists=tuple(kind.lists),
            is_block=is_block(name, kind),
            no_split=name in hints[0],
            repeated=name in hints[1],
            recommended=name in taken,
            reason=reason(name, kinds, taken, max(1, total)),
        )

    classes = sorted(map(block_class, kinds), key=lambda it: (not it.recommended, -it.parameters, it.class_name))
    outside = dict(sorted(parameters_outside(model, taken), key=lambda item: -item[1]))
    return Blocks(total, tuple(classes), taken, outside)


def chosen(kinds: Mapping[str, ClassStats], total: int) -> tuple[str, ...]:
    """Return the classes to take, those with the most parameters first."""
    blocks = [name for name, kind in kinds.items() if is_block(name, kind) and kind.largest >= SMALLEST_SHARE * total]
    sets = [
        fullest([name for name in blocks if kinds[name].largest <= share * total], kinds) for share in LARGEST_SHARES
    ]
    enough = next((names for names in sets if held(names, kinds) >= ENOUGH * total), None)
    taken = enough if enough is not None else max(sets, key=lambda names: held(names, kinds))
    return tuple(sorted(taken, key=lambda name: (-kinds[name].parameters, name)))


def fullest(names: Collection[str], kinds: Mapping[str, ClassStats]) -> Collection[str]:
    """Return the set among these classes that holds the most parameters while none contains another."""
    clash = next(((inner, outer) for inner in names for outer in names if outer in kinds[inner].within), None)
    if clash is None:
        return names
    choices = [fullest([name for name in names if name != dropped], kinds) for dropped in clash]
    return max(choices, key=lambda choice: held(choice, kinds))


def held(names: Collection[str], kinds: Mapping[str, ClassStats]) -> int:
    """Return how many parameters classes hold that do not contain one another."""
    return sum(kinds[name].parameters for name in names)


def reason(name: str, kinds: Mapping[str, ClassStats], taken: Collection[str], total: int) -> str:
    """Say why a class is taken or left."""
    kind = kinds[name]
    inside = [other for other in taken if other in kind.within]
    holds = [other for other in taken if name in kinds[other].within]
    if name in taken:
        return f"repeats in {', '.join(kind.lists)}"
    if name in CONTAINERS:
        return "only a list of other modules"
    if inside:
        wholly = sum(kind.within[other] for other in inside) == len(kind.paths)
        return f"lies {'' if wholly else 'partly '}within {', '.join(inside)}"
    if holds:
        return f"holds {', '.join(holds)}; one is up to {kind.largest / total:.1%} of the model"
    if not kind.lists:
        return "repeats in no ModuleList"
    if not kind.has_modules:
        return "holds no modules"
    if name in kind.within:
        return "modules of this class contain one another"
    return f"the largest is only {kind.largest / total:.2%} of the model"
