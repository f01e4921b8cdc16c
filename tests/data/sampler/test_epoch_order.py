from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.data.sampler.epoch_order import BLOCK, Bucket, EpochOrder


def bucket(groups: dict[int, int], passes: int = 1) -> Bucket:
    """Return a bucket with `groups[copies]` samples of each number of copies."""
    firsts = np.cumsum([0, *groups.values()])
    sizes = zip(groups.items(), firsts, strict=False)
    return Bucket({copies: np.arange(first, first + count) for (copies, count), first in sizes}, passes)


def whole(order: EpochOrder) -> list[int]:
    items: list[int] = []
    while len(items) < order.length:
        start, block = order.block_at(len(items))
        assert start == len(items) and 0 < len(block) <= BLOCK + len(order.groups)
        items += block.tolist()
    return items


GROUPS = st.dictionaries(st.integers(1, 30), st.integers(1, 900), min_size=1, max_size=4)


@given(GROUPS, st.integers(1, 3), st.data())
@hypothesis_settings(max_examples=40, deadline=None)
def test_an_epoch_holds_each_copy_once_evenly_spread_and_any_position_is_reached(groups, passes, data):
    each = bucket(groups, passes)
    order = EpochOrder(each, 1, "64x64", 0)
    items = np.array(whole(order))
    assert len(items) == len(each) == order.length
    for copies, samples in ((passes * copies, samples) for copies, samples in each.groups.items()):
        own = items[np.isin(items, samples)]
        permutations = own.reshape(copies, len(samples))
        assert (np.sort(permutations, axis=1) == samples).all(), "one permutation after the other"
        so_far = np.isin(items, samples).cumsum()
        due = np.arange(1, len(items) + 1) * len(own) / len(items)
        assert abs(so_far - due).max() < 1 + len(order.groups)
    at = data.draw(st.integers(0, len(items) - 1))
    start, block = EpochOrder(each, 1, "64x64", 0).block_at(at)
    assert start <= at < start + len(block) and np.array_equal(block, items[start : start + len(block)])


@pytest.mark.parametrize("count", [1000, 50_000_000])
def test_orders_differ_between_seeds_buckets_and_epochs_and_a_far_position_costs_one_block(count):
    each = Bucket({2: np.arange(count, dtype=np.uint32)})
    keys = [(seed, name, epoch) for seed in (0, 1) for name in ("a", "b") for epoch in (0, 1)]
    blocks = [EpochOrder(each, *key).block_at(2 * count - 1)[1] for key in keys]
    assert len({tuple(block.tolist()) for block in blocks}) == len(keys)
    assert all(block.max() < count for block in blocks)
