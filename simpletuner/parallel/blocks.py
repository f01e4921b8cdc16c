"""Which parts of a denoiser are worth gathering, freeing, recomputing and compiling as one: its repeated blocks.

A block is a class with modules inside that stands at least twice in one ModuleList. Blocks contain one another (a
U-Net's CrossAttnUpBlock2D holds Transformer2DModels, which hold BasicTransformerBlocks); units may not. So each
outermost block is taken while its largest instance is small, else the blocks within it. Only shapes are looked at, so
the model may be on the meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

LARGEST_SHARE = 1 / 20
"""A block that is more of the model than this gives way to the blocks within it. The published transformers have blocks
of 1 to 4 %; what one all-gather brings in has to fit beside everything else, twice when the next one is prefetched."""

SMALLEST_SHARE = 1 / 1000
"""Blocks that are less of the model than this, all together, stay outside."""

KEPT_WITHIN = 0.9
"""Share of a block's parameters that the blocks within must hold, to be taken instead of it."""


def recommended_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the classes that should become sharding units, those with the most parameters first."""
    total, sizes = parameters_of(model), sizes_by_class(model)
    repeated = repeated_classes(model)
    taken = chosen(model, repeated, sizes, total)
    worth = [name for name in taken if sum(sizes[name]) >= SMALLEST_SHARE * total]
    return tuple(sorted(worth, key=lambda name: (-sum(sizes[name]), name)))


def chosen(module: nn.Module, repeated: set[str], sizes: dict[str, list[int]], total: int) -> set[str]:
    """Return the outermost repeated classes below a module that are small enough, or else those within them."""
    taken: set[str] = set()
    for child in module.children():
        name = type(child).__name__
        if name in taken:
            continue
        within = chosen(child, repeated, sizes, total)
        if name in repeated and not (max(sizes[name]) > LARGEST_SHARE * total and kept(child, within) >= KEPT_WITHIN):
            taken.add(name)
        else:
            taken |= within
    return taken


def kept(module: nn.Module, classes: set[str]) -> float:
    """Return which share of a module's parameters lies within modules of these classes."""
    return sum(parameters_of(unit) for unit in outermost(module, classes)) / max(1, parameters_of(module))


def outermost(module: nn.Module, classes: set[str]) -> Iterator[nn.Module]:
    """Yield the modules of these classes below a module, but none that is within another."""
    for child in module.children():
        if type(child).__name__ in classes:
            yield child
        else:
            yield from outermost(child, classes)


def repeated_classes(model: nn.Module) -> set[str]:
    """Return the classes, with modules inside, of which some ModuleList holds two or more."""
    repeated: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child).__name__ for child in module if any(True for _ in child.children()))
            repeated |= {name for name, count in counts.items() if count > 1}
    return repeated


def sizes_by_class(model: nn.Module) -> dict[str, list[int]]:
    """Return the parameters of every module, by its class."""
    sizes: dict[str, list[int]] = {}
    for module in model.modules():
        sizes.setdefault(type(module).__name__, []).append(parameters_of(module))
    return sizes


def parameters_of(module: nn.Module) -> int:
    """Return how many parameters a module has."""
    return sum(parameter.numel() for parameter in module.parameters())
