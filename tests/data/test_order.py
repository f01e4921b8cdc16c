"""The order of samples of this version, in full: a run that today's code began must go on with it.

.venv/bin/python tests/data/test_order.py    # writes order_vN.json, after DATA_VERSION was raised to N
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpletuner.data.sampler.batch_sampler import DATA_VERSION, GlobalBatchSampler, SamplerState
from simpletuner.data.sampler.epoch_order import SORTED_SIZE, Bucket

FILE = Path(__file__).with_name(f"order_v{DATA_VERSION}.json")

CASES: dict[str, tuple[dict[str, dict[str, int]], int, int, int]] = {
    "buckets take turns": ({"a": {"1": 9}, "b": {"1": 7}, "c": {"1": 6}}, 3, 2, 24),
    "repeats are spread, and duplicates wait": ({"a": {"1": 3, "3": 4}, "b": {"2": 5}}, 1 << 40, 4, 14),
    "a small bucket": ({"a": {"5": 3}}, 0, 4, 8),
    "fractional copies": ({"a": {"3/2": 5, "1": 4}, "b": {"1/2": 9}}, 7, 3, 16),
    "items in a network": ({"a": {"1": SORTED_SIZE + 5000}}, 11, 6, 2),
}
"""Samples by number of copies by bucket; seed, batch size, and how many batches are recorded."""


def sampler(buckets: dict[str, dict[str, int]], seed: int) -> GlobalBatchSampler:
    made, first = {}, 0
    for name, groups in buckets.items():
        held: dict[int | Fraction, np.ndarray] = {}
        for copies, count in groups.items():
            number = Fraction(copies)
            held[number.numerator if number.denominator == 1 else number] = np.arange(first, first + count)
            first += count
        made[name] = Bucket(held)
    return GlobalBatchSampler(made, seed)


def following(order: GlobalBatchSampler, state: SamplerState, count: int) -> Iterator[list[Any]]:
    """Yield bucket and samples of each batch, and the state after it as a checkpoint holds it."""
    for batch, after in islice(order.batches(state), count):
        yield json.loads(json.dumps([batch.bucket, batch.samples, asdict(after)]))


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_this_version_began_goes_on_with_the_batches_that_it_would_take(name):
    buckets, seed, batch_size, count = CASES[name]
    rows, order = json.loads(FILE.read_text())[name], sampler(buckets, seed)
    assert list(following(order, order.start(batch_size), count)) == rows, "raise DATA_VERSION, or keep the order"
    for number, (_, _, state) in enumerate(rows):
        left = rows[number + 1 :][:2]
        assert list(following(order, SamplerState(**state), len(left))) == left


if __name__ == "__main__":
    orders = {name: (sampler(buckets, seed), size, count) for name, (buckets, seed, size, count) in CASES.items()}
    found = {name: list(following(each, each.start(size), count)) for name, (each, size, count) in orders.items()}
    texts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]"
        for name, rows in found.items()
    ]
    FILE.write_text("{" + ",\n".join(texts) + "}\n")
