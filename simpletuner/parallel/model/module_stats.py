"""Statistics of a model by class name: paths, parameters, nesting. From names and shapes alone, without torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

CONTAINERS = ("ModuleList", "Sequential", "ModuleDict")


@dataclass
class ClassStats:
    """The modules of one class in a model; `within` counts, by class, how many of them lie inside a module of it."""

    paths: list[str] = field(default_factory=list)
    parameters: int = 0
    largest: int = 0
    lists: list[str] = field(default_factory=list)
    within: Counter[str] = field(default_factory=Counter)
    has_modules: bool = False


def class_stats(model: nn.Module) -> dict[str, ClassStats]:
    """Collect the statistics of all modules below a model."""
    stats: dict[str, ClassStats] = {}

    def visit(module: nn.Module, path: str, above: tuple[str, ...]) -> dict[nn.Parameter, int]:
        """Return the elements of each parameter in a module; a parameter that is shared is one of each that has it."""
        held = {parameter: parameter.numel() for parameter in module.parameters(recurse=False)}
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

    visit(model, "", ())
    return stats


def repeated_in(module: nn.Module) -> set[str]:
    """The classes of which a container holds two or more; none for other modules."""
    if type(module).__name__ not in CONTAINERS:
        return set()
    counts = Counter(type(child).__name__ for child in module.children())
    return {name for name, count in counts.items() if count > 1}


def is_block(name: str, own: ClassStats) -> bool:
    """Return whether a class repeats, holds modules, and is never inside itself."""
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
