"""Compare contestants on a noisy machine: in turns within one process, by the median of the ratios of each round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Rounds = Mapping[str, Sequence[float]]


def nothing(_: str) -> None:
    """Prepare nothing."""


def seconds_in_turns(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    prepare: Callable[[str], object] = nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Call each contestant once per round, another one first each time, after an unmeasured `prepare(name)`.

    Return the seconds of every round by contestant; one more round goes before, to warm up. `time.process_time` as the
    clock counts what one process computes, on a machine that others use, too.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            prepare(name)
            began = clock()
            contestants[name]()
            seconds[name].append(clock() - began)
    return {name: values[1:] for name, values in seconds.items()}


def ratio(seconds: Rounds, name: str, other: str) -> float:
    """Return how much longer `name` takes than `other`: the median over rounds, since a machine's speed drifts."""
    return statistics.median(one / another for one, another in zip(seconds[name], seconds[other], strict=True))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print plain columns, the first one left-aligned."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
    print(title)
    for row in [columns, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells))
