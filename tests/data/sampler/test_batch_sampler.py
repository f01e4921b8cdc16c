from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice

from buckets import sampler_of
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.data.sampler.batch_sampler import GlobalBatch, GlobalBatchSampler, SamplerState, split_for_rank

BATCH_SIZES = st.integers(1, 12)


@st.composite
def fillable_buckets(draw) -> dict[str, list[int]]:
    """One to three buckets of 12 to 40 entries, some samples several times."""
    buckets, first = {}, 0
    for name in "abc"[: draw(st.integers(1, 3))]:
        samples, passes = draw(st.integers(12, 20)), draw(st.integers(1, 2))
        buckets[name] = list(range(first, first + samples)) * passes
        first += samples
    return buckets


def again(position: SamplerState) -> SamplerState:
    """Return a position as a checkpoint holds it."""
    return SamplerState(**json.loads(json.dumps(asdict(position))))


def seen_in(batches: list[GlobalBatch]) -> Counter[int]:
    return Counter(sample for batch in batches for sample in batch.samples)


def epochs_of(order: GlobalBatchSampler, epochs: int, batch_size: int) -> list[GlobalBatch]:
    steps = order.count_steps(epochs, batch_size)
    return [batch for batch, _ in islice(order.batches(order.start(batch_size)), steps)]


@given(fillable_buckets(), BATCH_SIZES, st.integers(0, 2**32), st.integers(1, 4))
@hypothesis_settings(max_examples=80, deadline=None)
def test_over_epochs_each_item_is_seen_as_often_as_planned_up_to_less_than_a_batch(buckets, batch_size, seed, epochs):
    order = sampler_of(buckets, seed)
    batches = epochs_of(order, epochs, batch_size)
    seen = seen_in(batches)
    for name, items in buckets.items():
        due = Counter(items * epochs)
        missing = {item: due[item] - seen[item] for item in due}
        assert min(missing.values()) >= 0, "nothing is seen more often than planned"
        assert sum(missing.values()) == epochs * len(items) % batch_size
        passes = len(items) // len(set(items))
        assert max(missing.values()) <= passes * -(-batch_size // len(items))
        assert sum(len(batch.samples) for batch in batches if batch.bucket == name) == seen_count(seen, items)
    assert set(seen) <= {item for items in buckets.values() for item in items}


def seen_count(seen: Counter[int], items: list[int]) -> int:
    return sum(seen[item] for item in set(items))


@given(fillable_buckets(), BATCH_SIZES, st.integers(0, 2**32))
@hypothesis_settings(max_examples=40, deadline=None)
def test_a_batch_is_full_and_comes_from_one_bucket(buckets, batch_size, seed):
    for batch in epochs_of(sampler_of(buckets, seed), 2, batch_size):
        assert len(batch.samples) == len(batch.occurrences) == batch_size
        assert set(batch.samples) <= set(buckets[batch.bucket])
        assert [*batch.occurrences] == [batch.samples[:at].count(item) for at, item in enumerate(batch.samples)]


@given(fillable_buckets(), BATCH_SIZES, st.integers(0, 2**32), st.integers(0, 60))
@hypothesis_settings(max_examples=60, deadline=None)
def test_any_position_gives_the_same_continuation_in_a_new_process(buckets, batch_size, seed, steps):
    straight = list(islice(sampler_of(buckets, seed).batches(sampler_of(buckets, seed).start(batch_size)), steps + 20))
    assert all(len(rest) < batch_size for _, after in straight for rest in after.carried.values())
    position = straight[steps - 1][1] if steps else sampler_of(buckets, seed).start(batch_size)
    assert list(islice(sampler_of(buckets, seed).batches(again(position)), 20)) == straight[steps:]


def test_a_position_is_plain_data():
    order = sampler_of({"a": list(range(5)), "b": list(range(5, 12))}, 0)
    _, after = list(islice(order.batches(order.start(2)), 7))[-1]
    assert (after.epoch, after.batch, after.batch_size) == (1, 2, 2)
    waiting = sum(map(len, after.carried.values()))
    assert sum(after.consumed.values()) + 2 - waiting == 4, (
        "two samples were carried over, and two batches of two taken"
    )
    assert again(after) == after


def test_an_epoch_holds_what_can_be_completed_and_carries_the_rest_over():
    order = sampler_of({"a": list(range(5))}, 0)
    batches = list(islice(order.batches(order.start(2)), 10))
    assert [after.epoch for _, after in batches] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    for epochs in (2, 4):
        seen = seen_in([batch for batch, after in batches if after.epoch < epochs])
        assert seen == dict.fromkeys(range(5), epochs)


def test_steps_of_epochs_counts_the_batches_of_those_epochs():
    order = sampler_of({"a": list(range(5)), "b": list(range(5, 12))}, 0)
    for epochs in range(1, 7):
        counted = sum(after.epoch < epochs for _, after in islice(order.batches(order.start(3)), 60))
        assert order.count_steps(epochs, 3) == counted


def test_different_seeds_and_epochs_give_different_orders():
    buckets = {"a": list(range(30))}

    def epoch(seed: int, number: int) -> list[tuple[int, ...]]:
        order = sampler_of(buckets, seed)
        return [batch.samples for batch, _ in islice(order.batches(order.start(5, epoch=number)), 6)]

    orders = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert all(seen_in([GlobalBatch("a", samples, ()) for samples in each]).total() == 30 for each in orders)
    assert len({str(each) for each in orders}) == 9


def test_a_position_in_a_large_bucket_is_reached_without_what_is_before_it():
    buckets = {"a": [*range(20_000), *range(300)], "b": list(range(30_000, 30_500))}
    order = sampler_of(buckets, 1)
    straight = list(islice(order.batches(order.start(64)), 400))  # 324 are an epoch
    assert seen_in([batch for batch, after in straight if after.epoch == 0]).total() == 324 * 64
    for step in (1, 63, 64, 200, 323, 324, 390):
        resumed = sampler_of(buckets, 1).batches(again(straight[step - 1][1]))
        assert list(islice(resumed, 5)) == straight[step : step + 5]


def test_every_order_of_turns_is_equally_likely():
    buckets, seeds = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}, 1200
    orders = Counter(
        "".join(batch.bucket for batch in epochs_of(sampler_of(buckets, seed), 1, 2)) for seed in range(seeds)
    )
    assert orders.keys() == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}
    assert sum((count - seeds / 6) ** 2 / (seeds / 6) for count in orders.values()) < 20.5  # chi-square, p = 0.001


def test_a_position_beyond_the_data_is_not_in_it():
    order = sampler_of({"a": list(range(5)), "b": list(range(5, 12))}, 0)
    *_, (_, last) = islice(order.batches(order.start(2)), 5)
    assert order.contains(last)
    assert not order.contains(replace(last, consumed={**last.consumed, "a": 6}))
    assert not order.contains(replace(last, consumed={"a": 5}))


def test_buckets_alternate_within_an_epoch():
    order = sampler_of({"a": list(range(40)), "b": list(range(40, 80))}, 3)
    names = [batch.bucket for batch in epochs_of(order, 1, 4)]
    assert sorted(names) == ["a"] * 10 + ["b"] * 10
    assert sum(one != two for one, two in zip(names, names[1:], strict=False)) > 3


def test_the_order_of_the_mapping_does_not_matter():
    one, two = {"a": [0, 1, 2], "b": [3, 4, 5]}, {"b": [3, 4, 5], "a": [0, 1, 2]}
    assert epochs_of(sampler_of(one, 1), 4, 2) == epochs_of(sampler_of(two, 1), 4, 2)


def test_a_batch_may_be_larger_than_several_epochs_of_a_bucket():
    order = sampler_of({"a": [0, 1, 2]}, 0)
    batch, after = next(order.batches(order.start(8)))
    counts = Counter(batch.samples)
    assert sum(counts.values()) == 8
    assert set(counts.values()) <= {2, 3}
    assert after.epoch == 2


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
@hypothesis_settings(deadline=None)
def test_rank_slices_partition_the_batch_for_every_number_of_ranks(ranks, accumulation, per_rank):
    size = ranks * accumulation * per_rank
    batch = GlobalBatch("a", tuple(range(size)), (0,) * size)
    shares = [split_for_rank(batch, rank, ranks, accumulation) for rank in range(ranks)]
    assert all(len(places) == per_rank for share in shares for places in share)
    assert all(len(share) == accumulation for share in shares)
    by_pass = [place for number in range(accumulation) for share in shares for place in share[number]]
    assert by_pass == list(range(size))


@given(fillable_buckets(), BATCH_SIZES, st.integers(0, 2**32), st.integers(1, 4))
@hypothesis_settings(max_examples=40, deadline=None)
def test_the_same_batch_size_leaves_a_position_as_it_is(buckets, batch_size, seed, steps):
    order = sampler_of(buckets, seed)
    _, position = list(islice(order.batches(order.start(batch_size)), steps))[-1]
    assert order.with_batch_size(position, batch_size) == position


@given(fillable_buckets(), BATCH_SIZES, BATCH_SIZES, st.integers(0, 2**32), st.integers(0, 30))
@hypothesis_settings(max_examples=80, deadline=None, derandomize=True)
def test_another_batch_size_in_the_middle_of_an_epoch_loses_and_doubles_nothing(buckets, first, second, seed, steps):
    order = sampler_of(buckets, seed)
    before = list(islice(order.batches(order.start(first)), steps))
    position = again(order.with_batch_size(before[-1][1] if before else order.start(first), second))
    finished = position.epoch + 1
    after = []
    for batch, place in order.batches(position):
        if place.epoch >= finished:
            break
        after.append(batch)
    seen = seen_in([batch for batch, _ in before] + after)
    for items in buckets.values():
        due = Counter(items * finished)
        missing = {item: due[item] - seen[item] for item in due}
        assert min(missing.values()) >= 0, "nothing is doubled"
        assert sum(missing.values()) < second, "what is lost is less than a batch, and opens the next epoch"


def test_another_batch_size_after_one_step_shows_each_item_once_in_the_epoch():
    shown_twice = {}
    for seed in range(8):
        order = sampler_of({"a": list(range(12))}, seed)
        first, position = next(order.batches(order.start(3)))
        rest = [batch for batch, _ in islice(order.batches(order.with_batch_size(position, 1)), 9)]
        shown_twice[seed] = set(first.samples) & set(seen_in(rest))
    assert shown_twice == dict.fromkeys(range(8), set())


UNIFORM = st.tuples(st.integers(1, 30), st.integers(1, 6))
"""Pictures of a bucket, and how often an epoch shows each."""


def is_distinct(batch: GlobalBatch) -> bool:
    return len(set(batch.samples)) == len(batch.samples)


@given(UNIFORM, st.data(), st.integers(0, 2**32))
@hypothesis_settings(max_examples=150, deadline=None)
def test_no_batch_holds_a_picture_twice_while_others_wait(bucket, data, seed):
    pictures, shows = bucket
    batch_size = data.draw(st.integers(1, pictures))
    order = sampler_of({"a": list(range(pictures)) * shows}, seed)
    for batch in epochs_of(order, 4, batch_size):
        assert is_distinct(batch)


@given(UNIFORM, st.data(), st.integers(0, 2**32))
@hypothesis_settings(max_examples=100, deadline=None)
def test_a_batch_larger_than_its_bucket_holds_every_picture_about_equally_often(bucket, data, seed):
    pictures, shows = bucket
    batch_size = data.draw(st.integers(pictures, 4 * pictures))
    order = sampler_of({"a": list(range(pictures)) * shows}, seed)
    for batch in epochs_of(order, 6, batch_size):
        counts = Counter(batch.samples)
        assert len(counts) == pictures
        assert max(counts.values()) - min(counts.values()) <= 2


def test_repeats_of_few_pictures_do_not_meet_in_a_batch():
    for pictures, repeats, batch_size in (
        (20, 9, 8),
        (20, 9, 16),
        (10, 19, 8),
    ):  # 76 to 100 % did when shuffled together
        order = sampler_of({"a": sorted(list(range(pictures)) * (1 + repeats))}, 0)
        assert all(map(is_distinct, epochs_of(order, 5, batch_size)))


def test_a_dataset_with_more_repeats_is_spread_over_the_epoch_among_others():
    order = sampler_of({"a": [*range(100), *[100, 101] * 50]}, 0)  # 100 pictures once, two of another dataset 50 times
    for batch in epochs_of(order, 4, 4):
        frequent = [sample for sample in batch.samples if sample >= 100]
        assert 1 <= len(frequent) <= 3 and len(set(batch.samples)) >= 3


@given(fillable_buckets(), st.lists(st.tuples(BATCH_SIZES, st.integers(0, 6)), max_size=5), st.integers(0, 2**32))
@hypothesis_settings(max_examples=80, deadline=None)
def test_batch_sizes_that_change_again_and_again_lose_and_double_nothing(buckets, sizes, seed):
    order, taken = sampler_of(buckets, seed), []
    position = order.start(3)
    for size, steps in sizes:
        position = order.with_batch_size(again(position), size)
        for batch, after in islice(order.batches(position), steps):
            taken.append(batch)
            position = after
    seen = seen_in(taken)
    left = order.count_steps_left(order.with_batch_size(position, 1), position.epoch + 1)
    assert left + seen.total() == (position.epoch + 1) * sum(map(len, buckets.values()))
    for batch, _ in islice(order.batches(order.with_batch_size(position, 1)), left):
        seen.update(batch.samples)
    for items in buckets.values():
        due = Counter(items * (position.epoch + 1))
        assert {item: seen[item] for item in due} == due


@given(fillable_buckets(), BATCH_SIZES, st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 5))
@hypothesis_settings(max_examples=40, deadline=None)
def test_steps_left_counts_what_is_still_to_come(buckets, batch_size, seed, steps, epochs):
    order = sampler_of(buckets, seed)
    position = list(islice(order.batches(order.start(batch_size)), steps))[-1][1] if steps else order.start(batch_size)
    counted = sum(after.epoch < epochs for _, after in islice(order.batches(position), 600 // batch_size + 60))
    assert order.count_steps_left(position, epochs) == counted
