"""What a denoiser consists of, by the names of its modules' classes; from names and shapes alone, and without torch."""

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
    """What is seen of one class on the way through a model; `within` says how many modules have a class above."""

    paths: list[str] = field(default_factory=list)
    parameters: int = 0
    largest: int = 0
    lists: list[str] = field(default_factory=list)
    within: Counter[str] = field(default_factory=Counter)
    has_modules: bool = False


def class_stats(model: nn.Module) -> dict[str, ClassStats]:
    """Return what a model consists of, by class name; the model itself is left out."""
    kinds: dict[str, ClassStats] = {}

    def visit(module: nn.Module, path: str, above: tuple[str, ...]) -> None:
        """Note the modules below one, and go on below them."""
        repeated, pattern = repeated_in(module), re.sub(r"\b\d+\b", "*", path)
        for child_name, child in module.named_children():
            name, child_path = type(child).__name__, f"{path}.{child_name}".lstrip(".")
            kind = kinds.setdefault(name, ClassStats())
            size = parameters_of(child)
            kind.paths.append(child_path)
            kind.parameters += 0 if name in above else size
            kind.largest = max(kind.largest, size)
            kind.lists += [pattern] * (name in repeated and pattern not in kind.lists)
            kind.within.update(set(above))
            kind.has_modules = kind.has_modules or any(True for _ in child.children())
            visit(child, child_path, (*above, name))

    visit(model, "", ())
    return kinds


def repeated_in(module: nn.Module) -> set[str]:
    """Return the classes of which a container holds two or more; none for other modules."""
    if type(module).__name__ not in CONTAINERS:
        return set()
    counts = Counter(type(child).__name__ for child in module.children())
    return {name for name, count in counts.items() if count > 1}


def is_block(name: str, kind: ClassStats) -> bool:
    """Say whether a class repeats, holds modules, and never lies within itself."""
    return bool(kind.lists) and kind.has_modules and name not in CONTAINERS and name not in kind.within


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
        elif size := parameters_of(child):
            yield child_path, size


def parameters_of(module: nn.Module) -> int:
    """Return how many parameters a module has."""
    return sum(parameter.numel() for parameter in module.parameters())
