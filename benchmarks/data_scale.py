"""How the data's costs grow with the number of samples: grouping them into buckets, and their order.

Drawn columns instead of images: a shape and one of two datasets for each sample. Times are CPU times of the one thread
that does it, since the longest of many steps would be one that other work interrupts. Largest number:
DATA_SCALE_SAMPLES.
"""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
from interleaved import print_table

from simpletuner.data.sampler.batch_sampler import GlobalBatch, GlobalBatchSampler, SamplerState
from simpletuner.data.samples.buckets import group_samples

COUNTS = (100_000, 1_000_000, 10_000_000, 100_000_000)
SHAPES, COPIES = 40, (1, 3)
BATCH_SIZE, STEPS = 8, 20_000

Steps = Iterator[tuple[GlobalBatch, SamplerState]]


def row(count: int) -> list[str]:
    """Return the figures of one number of samples."""
    random = np.random.default_rng(0)
    shapes = random.integers(SHAPES, size=count, dtype=np.uint8)
    datasets = (random.integers(10, size=count, dtype=np.uint8) == 0).astype(np.uint8)
    began = time.thread_time()
    sampler = make_sampler(shapes, datasets)
    built = time.thread_time() - began
    steps = sampler.batches(sampler.start(BATCH_SIZE))
    first, inside = milliseconds(steps, 1)[0], milliseconds(steps, STEPS)
    around = milliseconds(sampler.batches(before_the_turn(sampler, STEPS // 2)), STEPS)
    times = [f"{1000 * statistics.mean(each):.0f}" for each in (inside, around)]
    longest = [f"{each:.1f}" for each in (first, max(inside), max(around))]
    return [f"{count:,}", f"{built:.2f}", *times, *longest, *bytes_held(shapes, datasets)]


def make_sampler(shapes: np.ndarray, datasets: np.ndarray) -> GlobalBatchSampler:
    return GlobalBatchSampler(group_samples(shapes, [f"{each:02}" for each in range(SHAPES)], datasets, COPIES), 0)


def bytes_held(shapes: np.ndarray, datasets: np.ndarray) -> list[str]:
    """Return the MiB that the sampler holds, that making it took at most, and that its steps add."""
    tracemalloc.start()
    sampler = make_sampler(shapes, datasets)
    held, peak = tracemalloc.get_traced_memory()
    steps = sampler.batches(sampler.start(BATCH_SIZE))
    milliseconds(steps, STEPS)
    running, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return [f"{each / 2**20:,.1f}" for each in (held, peak, running - held)]


def before_the_turn(sampler: GlobalBatchSampler, steps: int) -> SamplerState:
    """Return a position about `steps` batches before the end of the first epoch, which takes no time to reach."""
    total = sum(map(len, sampler.buckets.values()))
    consumed = {
        name: len(each) - min(len(each), steps * BATCH_SIZE * len(each) // total)
        for name, each in sampler.buckets.items()
    }
    return replace(sampler.start(BATCH_SIZE), batch=total // BATCH_SIZE - steps, consumed=consumed)


def milliseconds(steps: Steps, count: int) -> list[float]:
    """Return how long each of the next `count` steps takes to find its samples."""
    times = [time.thread_time(), *(time.thread_time() for _ in islice(steps, count))]
    return [1000 * (end - start) for start, end in zip(times, times[1:], strict=False)]


def main() -> None:
    """Print how each cost grows."""
    columns = ["samples", "grouped, s", "us per step", "at the turn", "first step, ms", "longest", "at the turn"]
    memory = ["buckets, MiB", "while grouped", "order"]
    largest = int(os.environ.get("DATA_SCALE_SAMPLES", COUNTS[-1]))
    rows = [row(count) for count in COUNTS if count <= largest]
    title = f"{SHAPES} buckets, batch {BATCH_SIZE}, a tenth shown three times; {STEPS} steps, and as many around a turn"
    print_table(title, [*columns, *memory], rows)


if __name__ == "__main__":
    main()
