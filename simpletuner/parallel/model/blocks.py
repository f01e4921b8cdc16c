"""Choose the units for FSDP's gathering, recomputation and compilation: the repeated blocks.

A block is a class with submodules that occurs at least twice in one ModuleList. Blocks may be nested (a
U-Net's CrossAttnUpBlock2D holds Transformer2DModels, which hold BasicTransformerBlocks), units may not. So of
all sets of blocks without nesting, the one with most of the model is taken. Only class names, paths and
shapes are read: the model may be on the meta device, and this file needs no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simpletuner.private_api.of_diffusers import blocks_by_name

if TYPE_CHECKING:
    from torch import nn

CONTAINERS = ("ModuleList", "Sequential", "ModuleDict")


@dataclass
class ClassStats:
    """Modules of one class in a model; `within` counts those inside another class's module."""

    paths: list[str] = field(default_factory=list)
    parameters: int = 0
    largest: int = 0
    lists: list[str] = field(default_factory=list)
    within: Counter[str] = field(default_factory=Counter)
    has_modules: bool = False


def class_stats(model: nn.Module) -> tuple[dict[str, ClassStats], int]:
    """The classes of a model's modules by name, and its number of parameters."""
    stats: dict[str, ClassStats] = {}

    def visit(module: nn.Module, path: str, above: tuple[str, ...]) -> dict[int, int]:
        """Elements of each parameter in a module, by its id; a shared one counts once for each owner."""
        held = {id(parameter): parameter.numel() for parameter in module.parameters(recurse=False)}
        repeated, pattern = repeated_in(module), re.sub(r"\b\d+\b", "*", path)
        for child_name, child in module.named_children():
            name, child_path = type(child).__name__, f"{path}.{child_name}".lstrip(".")
            own = stats.setdefault(name, ClassStats())
            own.paths.append(child_path)
            own.lists += [pattern] * (name in repeated and pattern not in own.lists)
            own.within.update(set(above))
            own.has_modules = own.has_modules or any(True for _ in child.children())
            below = visit(child, child_path, (*above, name))
            size = sum(below.values())
            # A module inside one of its own class is counted with it already.
            own.parameters += 0 if name in above else size
            own.largest = max(own.largest, size)
            held |= below
        return held

    held = visit(model, "", ())
    return stats, sum(held.values())


def repeated_in(module: nn.Module) -> set[str]:
    """Classes with two or more instances in a container; none for other modules."""
    if type(module).__name__ not in CONTAINERS:
        return set()
    counts = Counter(type(child).__name__ for child in module.children())
    return {name for name, count in counts.items() if count > 1}


def is_block(name: str, own: ClassStats) -> bool:
    """True if a class repeats, contains modules, and is never nested in itself."""
    return bool(own.lists) and own.has_modules and name not in CONTAINERS and name not in own.within


def parameters_outside(module: nn.Module, classes: Collection[str], path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the paths of the outermost modules, or parameters, that neither are units nor hold any."""
    for name, parameter in module.named_parameters(path, recurse=False):
        yield name, parameter.numel()
    for name, child in module.named_children():
        child_path = f"{path}.{name}".lstrip(".")
        if type(child).__name__ in classes:
            continue
        if any(type(below).__name__ in classes for below in child.modules()):
            yield from parameters_outside(child, classes, child_path)
        elif size := count_parameters(child):
            yield child_path, size


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# Upper bounds for the share of one unit: the weights of one all-gather need memory in addition to
# everything else, twice when the next unit is prefetched. Published transformers have blocks of 1 to 5 %.
# The first bound is used under which the units hold ENOUGH of the model.
LARGEST_SHARES = (1 / 20, 1 / 10, 1 / 5, 1)

ENOUGH = 0.95
"""Share of the model to cover by units; the rest is gathered with the root and kept all pass."""

# Smallest share of the model for a unit's largest module: each all-gather costs its latency.
SMALLEST_SHARE = 1 / 500

PATHS_SHOWN = 3


@dataclass(frozen=True)
class BlockClass:
    """Modules of one class in a denoiser, and the recommendation whether to make each a unit.

    `largest` counts the parameters of the largest module, `lists` are the ModuleLists in which the class
    repeats (`*`: any number), `is_block` says whether it could be a unit; `no_split` and `repeated` are the
    hints of diffusers' `_no_split_modules` and `_repeated_blocks`.
    """

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
    """A denoiser by classes: the recommended ones first, then by parameters.

    `outside` counts the parameters that no unit holds, by path.
    """

    total_parameters: int
    classes: tuple[BlockClass, ...]
    recommended: tuple[str, ...]
    outside: Mapping[str, int]


def recommended_blocks(model: nn.Module) -> tuple[str, ...]:
    """The classes that should become sharding units, those with the most parameters first."""
    return choose(*class_stats(model))


def block_paths(model: nn.Module, classes: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name, module in model.named_modules() if type(module).__name__ in classes)


def is_hidden_matrix(name: str, dimensions: int, blocks: Collection[str]) -> bool:
    """True for the weight of a linear layer inside one of the blocks at these paths.

    Embeddings, first and last layers are outside; 2-D tables of shifts and scales are no `weight`.
    """
    is_inside = any(name.startswith(f"{block}.") for block in blocks)
    return is_inside and name.endswith(".weight") and dimensions == 2


def blocks_of(model: nn.Module) -> list[str]:
    """The classes that could become sharding units."""
    return sorted(name for name, own in class_stats(model)[0].items() if is_block(name, own))


def detect_blocks(model: nn.Module) -> Blocks:
    """List the classes of a denoiser, and choose those that should become sharding units."""
    stats, total = class_stats(model)
    taken = choose(stats, total)
    hints = blocks_by_name(model)

    def block_class(name: str) -> BlockClass:
        own = stats[name]
        return BlockClass(
            class_name=name,
            count=len(own.paths),
            parameters=own.parameters,
            share=own.parameters / max(1, total),
            largest=own.largest,
            sample_paths=tuple(own.paths[:PATHS_SHOWN]),
            lists=tuple(own.lists),
            is_block=is_block(name, own),
            no_split=name in hints[0],
            repeated=name in hints[1],
            recommended=name in taken,
            reason=reason(name, stats, taken, max(1, total)),
        )

    classes = sorted(map(block_class, stats), key=lambda it: (not it.recommended, -it.parameters, it.class_name))
    outside = dict(sorted(parameters_outside(model, taken), key=lambda item: -item[1]))
    return Blocks(total, tuple(classes), taken, outside)


def choose(stats: Mapping[str, ClassStats], total: int) -> tuple[str, ...]:
    blocks = [name for name, own in stats.items() if is_block(name, own) and own.largest >= SMALLEST_SHARE * total]
    sets = [
        fullest([name for name in blocks if stats[name].largest <= share * total], stats) for share in LARGEST_SHARES
    ]
    enough = next((names for names in sets if parameters_in(names, stats) >= ENOUGH * total), None)
    taken = enough if enough is not None else max(sets, key=lambda names: parameters_in(names, stats))
    return tuple(sorted(taken, key=lambda name: (-stats[name].parameters, name)))


def fullest(names: Collection[str], stats: Mapping[str, ClassStats]) -> Collection[str]:
    """The subset of these classes that holds the most parameters while none contains another."""
    # Recursively: of the first nested pair, drop either class, and keep the better of both results.
    clash = next(((inner, outer) for inner in names for outer in names if outer in stats[inner].within), None)
    if clash is None:
        return names
    choices = [fullest([name for name in names if name != dropped], stats) for dropped in clash]
    return max(choices, key=lambda choice: parameters_in(choice, stats))


def parameters_in(names: Collection[str], stats: Mapping[str, ClassStats]) -> int:
    return sum(stats[name].parameters for name in names)


def reason(name: str, stats: Mapping[str, ClassStats], taken: Collection[str], total: int) -> str:
    own = stats[name]
    inside = [other for other in taken if other in own.within]
    holds = [other for other in taken if name in stats[other].within]
    if name in taken:
        return f"repeats in {', '.join(own.lists)}"
    if name in CONTAINERS:
        return "only a list of other modules"
    if inside:
        wholly = sum(own.within[other] for other in inside) == len(own.paths)
        return f"{'' if wholly else 'partly '}inside {', '.join(inside)}"
    if holds:
        return f"holds {', '.join(holds)}; one is up to {own.largest / total:.1%} of the model"
    if not own.lists:
        return "repeats in no ModuleList"
    if not own.has_modules:
        return "holds no modules"
    if name in own.within:
        return "modules of this class contain one another"
    return f"the largest is only {own.largest / total:.2%} of the model"
