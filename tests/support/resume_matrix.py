"""Every engine resumes from checkpoints of others, on other numbers of ranks: a sample of the pairs, or all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import engines
import pytest

PAIRS = ("whole", "fsdp2", "cp2", "zero1", "zero2-cpu", "zero3")
ENGINES_OF = {1: ("whole",), 2: PAIRS, 4: ("hybrid-sync", "hybrid-cp2", "zero3")}
"""Engines by number of ranks."""
NAMES = [f"{name}-x{world}" for world, names in ENGINES_OF.items() for name in names]
SAMPLED = [name for name in NAMES if name != "hybrid-sync-x4"]
"""Engines of a sample, each of which takes the checkpoint of the one that stands DISTANCE places after it."""
DISTANCE = 4
OF_THEIR_OWN = ("cp2-x2", "zero2-cpu-x2", "zero3-x2", "hybrid-cp2-x4")
"""Engines that resume from their own in a sample, too; `test_two_and_two_steps_equal_four_bit_for_bit` has others."""

RunOn = Callable[..., dict[str, Any]]


def sampled_sources(target: str) -> list[str]:
    if target not in SAMPLED:
        return []
    other = SAMPLED[(SAMPLED.index(target) + DISTANCE) % len(SAMPLED)]
    return [target, other] if target in OF_THEIR_OWN else [other]


def resumed(
    run_on: RunOn, arguments: dict[str, Any], sources_of: Callable[[str], list[str]]
) -> Iterator[tuple[str, list[str]]]:
    """Save and resume on every engine that has sources; yield each pair and what is wrong with it."""
    expected: dict[str, Any] = {}
    taken = {
        world: {name: found for name in names if (found := sources_of(f"{name}-x{world}"))}
        for world, names in ENGINES_OF.items()
    }
    for world, sources in taken.items():
        expected |= run_on(engines.save_in_turn, world, arguments, list(sources))
    for world, sources in taken.items():
        for pair, (different, steps) in run_on(engines.resume_in_turn, world, arguments, sources).items():
            target, _, source = pair.partition(" from ")
            yield pair, [f"{name} is another" for name in different] + wrong(steps, expected[source], target == source)


def wrong(steps: list[list[float]], expected: list[list[float]], is_same_engine: bool) -> list[str]:
    """Describe losses and norms that differ: at all after the same engine, in the sixth digit after another one."""
    near = list(chain(*steps)) == pytest.approx(list(chain(*expected)), rel=1e-5)
    return [] if near and (steps == expected or not is_same_engine) else [f"{steps} instead of {expected}"]
