"""How fast a run has been lately, and how long the rest of it takes, saving and validation included."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

RECENT_STEPS = 50


class Pace:
    """Measures steps, and what runs between them; `intervals` are the steps between runs of each, 0: after the last."""

    def __init__(self, max_steps: int, intervals: Mapping[str, int]) -> None:
        self.max_steps, self.intervals = max_steps, intervals
        self.steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """Seconds of a step, and the part of them that was spent waiting for its batch."""
        self.measured = 0
        self.durations: dict[str, list[float]] = {name: [] for name in intervals}
        self.pending: list[str] = []
        """What is due at the present step and has not run yet."""

    def add_step(self, seconds: float, data_seconds: float) -> None:
        self.measured += 1
        if self.measured == 2:
            self.steps.clear()  # the first step compiles kernels and fills caches
        self.steps.append((seconds, data_seconds))

    @property
    def step_seconds(self) -> float:
        """The mean of the last steps; at least one must have been added."""
        return sum(seconds for seconds, _ in self.steps) / len(self.steps)

    @property
    def data_share(self) -> float:
        """The part of the last steps that was spent waiting for batches, from 0 to 1."""
        waited, all_seconds = sum(data for _, data in self.steps), sum(seconds for seconds, _ in self.steps)
        return min(1.0, waited / all_seconds) if all_seconds else 0.0

    def expect(self, names: Sequence[str]) -> None:
        """Count what is due at the present step as still to come."""
        self.pending = list(names)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure what runs between two steps."""
        began = time.monotonic()
        yield
        self.durations[name].append(time.monotonic() - began)
        self.pending = [each for each in self.pending if each != name]

    def seconds_left(self, step: int) -> float | None:
        """Return how long the rest takes after a step; None before the first one. What never ran counts as nothing."""
        if not self.steps:
            return None
        runs = {
            name: self._runs_after(step, every) + self.pending.count(name) for name, every in self.intervals.items()
        }
        between = sum(count * mean(self.durations[name]) for name, count in runs.items())
        return (self.max_steps - step) * self.step_seconds + between

    def _runs_after(self, step: int, every: int) -> int:
        """How often something still runs that is due at each multiple of `every` and after the last step."""
        if step >= self.max_steps:
            return 0
        return self.max_steps // every - step // every + bool(self.max_steps % every) if every else 1


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
