"""Traces of denoisers with many equal blocks, from traces of the same denoiser with two or three of each kind.

All that a step holds and does is a line in the number of blocks: FLUX has 57 of two kinds, of which 14 are traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from simpletuner.models.analysis.step_trace import StepTrace

SHORT = 2
"""Blocks of each kind: a first and a last one. A third is one between others."""
NUMBERS = ("kept_bytes", "host_bytes", "product_flops", "attention_flops", "other_bytes", "launches")


def equal_blocks(model: nn.Module) -> dict[str, int]:
    """Return the number of equal blocks by the name of their list; none where shorter lists would save little."""
    lists = {name: child for name, child in model.named_children() if isinstance(child, nn.ModuleList)}
    found = {name: len(blocks) for name, blocks in lists.items() if len(set(map(signature, blocks))) == 1}
    kinds = len(found)
    traced = SHORT * kinds * (kinds + 1) + kinds
    return found if sum(found.values()) > 2 * traced and min(found.values()) > SHORT else {}


def signature(block: nn.Module) -> tuple[object, ...]:
    return type(block), tuple((name, each.shape, each.requires_grad) for name, each in block.named_parameters())


@contextmanager
def shortened(model: nn.Module, counts: Mapping[str, int]) -> Iterator[None]:
    """Leave only so many of the first blocks in each list."""
    whole = {name: getattr(model, name) for name in counts}
    try:
        for name, count in counts.items():
            setattr(model, name, nn.ModuleList(list(whole[name])[:count]))
        yield
    finally:
        for name, blocks in whole.items():
            setattr(model, name, blocks)


def trace_by_kinds(model: nn.Module, counts: Mapping[str, int], trace: Callable[[], StepTrace]) -> StepTrace:
    """Return the trace of a model with all of its equal blocks; `trace` is called for the model with fewer of them."""
    sizes = {name: each.numel() for name, each in model.named_parameters() if each.requires_grad}
    short = dict.fromkeys(counts, SHORT)
    with shortened(model, short):
        base = trace()
    longer = {}
    for kind in counts:
        with shortened(model, short | {kind: SHORT + 1}):
            longer[kind] = trace()
    return Lengthened(base, longer, counts, sizes).trace()


class Lengthened:
    """A trace of few blocks, and for each kind one with a block more."""

    def __init__(
        self, base: StepTrace, longer: Mapping[str, StepTrace], counts: Mapping[str, int], sizes: Mapping[str, int]
    ) -> None:
        self.base, self.longer, self.sizes = base, longer, sizes
        self.more = {kind: count - SHORT for kind, count in counts.items()}
        self.live = live_bytes(base)
        self.live_longer = {kind: live_bytes(trace) for kind, trace in longer.items()}
        self.block = re.compile(rf"({'|'.join(map(re.escape, counts))})\.(\d+)\.(.+)")

    def trace(self) -> StepTrace:
        numbers = {name: self.line(lambda trace, name=name: getattr(trace, name)) for name in NUMBERS}
        points, done, total = [], 0, sum(self.sizes.values())
        for name, live in self.releases():
            points.append((live, done / total))
            done += self.sizes[name]
        end = self.line(lambda trace: trace.backward_points[-1][0])
        order = tuple(name for name, _ in self.releases())
        return replace(self.base, backward_points=(*points, (end, 1.0)), released=order, **numbers)

    def line(self, number_of: Callable[[StepTrace], int]) -> int:
        """Return a number of the whole model, to which each further block adds what the third one does."""
        first = number_of(self.base)
        return first + sum(more * (number_of(self.longer[kind]) - first) for kind, more in self.more.items())

    def releases(self) -> Iterator[tuple[str, int]]:
        """Yield the parameters in the order in which their gradients are there, with the bytes of activations then."""
        pending = dict(self.more)
        for name in self.base.released:
            found = self.block.fullmatch(name)
            if found and found[2] == "0" and (count := pending.pop(found[1], 0)):
                yield from self.between(found[1], count)
            yield (name if found is None else self.renamed(found)), self.at(name)

    def renamed(self, found: re.Match[str]) -> str:
        kind, number, rest = found.groups()
        return f"{kind}.{int(number) + self.more[kind] if number != '0' else 0}.{rest}"

    def at(self, name: str) -> int:
        """Return the bytes at a parameter that the short model has; of a last block it is the longer model's last."""
        own = self.block.fullmatch(name)
        live = self.live[name]
        for kind, more in self.more.items():
            is_last = own is not None and own[1] == kind and own[2] != "0"
            there = f"{kind}.{SHORT}.{own[3]}" if own is not None and is_last else name
            live += more * (self.live_longer[kind][there] - self.live[name])
        return live

    def between(self, kind: str, count: int) -> Iterator[tuple[str, int]]:
        """Yield the parameters of the blocks that are neither the first nor the last of a kind, the last ones first."""
        trace, live = self.longer[kind], self.live_longer[kind]
        names = [name for name in trace.released if name.startswith(f"{kind}.1.")]
        block_bytes = trace.kept_bytes - self.base.kept_bytes
        for number in range(count, 0, -1):
            for name in names:
                rest = name.removeprefix(f"{kind}.1.")
                first = f"{kind}.0.{rest}"
                others = sum(
                    more * (self.live_longer[other][first] - self.live[first])
                    for other, more in self.more.items()
                    if other != kind
                )
                yield f"{kind}.{number}.{rest}", live[name] + (number - 1) * block_bytes + others


def live_bytes(trace: StepTrace) -> dict[str, int]:
    points = trace.backward_points[:-1]
    return {name: live for name, (live, _) in zip(trace.released, points, strict=True)}
