from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from buckets import bucket_of, listed_items
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scanning import drawn

from simpletuner.data.config.dataset_parts import VideoSettings
from simpletuner.data.sampler.epoch_order import Bucket
from simpletuner.data.samples.buckets import (
    Buckets,
    digest_buckets,
    fill_buckets,
    group_samples,
    make_buckets,
    sufficient_repeats,
)
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.errors import DataError, ExitCode


def squares(count: int, repeats: int = 0) -> Samples:
    return Samples([drawn(*[(64, 64)] * count, repeats=repeats)])


def buckets_of(lists: dict[str, list[int]]) -> Buckets:
    return {name: bucket_of(items) for name, items in lists.items()}


def listed(buckets: Buckets) -> dict[str, list[int]]:
    return {name: listed_items(bucket).tolist() for name, bucket in buckets.items()}


def shortage(buckets: Buckets, effective_batch_size: int) -> DataError:
    with pytest.raises(DataError) as caught:
        fill_buckets(buckets, effective_batch_size, oversubscribe=False)
    assert caught.value.exit_code == ExitCode.DATA
    return caught.value


def test_samples_of_one_shape_share_a_bucket_named_width_by_height():
    samples = Samples([drawn((128, 64), (64, 64), (64, 128), (128, 64))])
    assert listed(make_buckets(samples)) == {"128x64": [0, 3], "64x64": [1], "64x128": [2]}
    assert list(make_buckets(samples)) == ["128x64", "64x128", "64x64"]


def test_a_size_of_which_no_image_is_left_makes_no_bucket():
    left = drawn((64, 64), (128, 64)).where(np.array([True, False]))
    assert listed(make_buckets(Samples([left]))) == {"64x64": [0]}


def test_a_batch_has_a_first_frame_of_each_clip_or_of_none():
    def part(name: str, is_i2v: bool) -> DatasetSamples:
        return drawn((64, 64), (64, 64), dataset=name, dataset_type="video", video=VideoSettings(is_i2v=is_i2v))

    mixed = [part("a", True), part("b", False), part("c", True), drawn((64, 64), dataset="images")]
    assert listed(make_buckets(Samples(mixed))) == {"64x64": [2, 3, 6], "64x64+first_frame": [0, 1, 4, 5]}
    assert listed(make_buckets(Samples([part("a", True), part("b", True)]))) == {"64x64": [0, 1, 2, 3]}


def test_repeats_are_extra_passes_of_their_own_dataset():
    samples = Samples([drawn((64, 64), repeats=2), drawn((128, 64), (64, 64), dataset="e")])
    assert listed(make_buckets(samples)) == {"64x64": [0, 0, 0, 2], "128x64": [1]}


def test_buckets_that_fill_the_batch_stay_as_they_are():
    buckets = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7, 8]}
    for oversubscribe in (False, True):
        assert listed(fill_buckets(buckets_of(buckets), 4, oversubscribe)) == buckets


def test_oversubscription_repeats_small_buckets_just_as_often_as_needed():
    buckets = {"a": [0], "b": [1, 2, 3], "c": list(range(8)), "d": list(range(9))}
    full = fill_buckets(buckets_of(buckets), 8, oversubscribe=True)
    assert listed(full) == {"a": [0] * 8, "b": [1, 2, 3] * 3, "c": list(range(8)), "d": list(range(9))}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 64))
@hypothesis_settings(deadline=None)
def test_oversubscription_fills_the_batch_and_one_pass_less_would_not(sizes, effective_batch_size):
    buckets = {str(number): list(range(size)) for number, size in enumerate(sizes)}
    for name, items in listed(fill_buckets(buckets_of(buckets), effective_batch_size, oversubscribe=True)).items():
        size = len(buckets[name])
        assert len(items) >= effective_batch_size
        assert len(items) == size or len(items) - size < effective_batch_size
        assert {items.count(item) for item in set(items)} == {len(items) // size}


@given(
    st.dictionaries(st.fractions(Fraction(1, 20), 3, max_denominator=20), st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 100),
)
@example({Fraction(2, 3): 2}, 96)
@hypothesis_settings(deadline=None)
def test_fractional_copies_are_repeated_just_as_often_as_needed(sizes, effective_batch_size):
    bucket = Bucket({copies: np.arange(size, dtype=np.uint32) for copies, size in sizes.items()})
    full = fill_buckets({"64x64": bucket}, effective_batch_size, oversubscribe=True)["64x64"]

    def shortest_epoch(passes: int) -> int:
        repeated = replace(bucket, passes=passes)
        return min(repeated.items_until(epoch + 1) - repeated.items_until(epoch) for epoch in range(20))

    assert shortest_epoch(full.passes) >= effective_batch_size
    assert full.passes == 1 or shortest_epoch(full.passes - 1) < effective_batch_size


def test_the_error_has_the_numbers_of_each_small_bucket_and_the_ways_out():
    # effective batch 8; 1152x896 has 3 pictures (repeats 2 -> 9 entries), 64x64 has 2, 128x64 has 8
    buckets = {"1152x896": [0, 1, 2], "128x64": list(range(3, 11)), "64x64": [11, 12]}
    error = shortage(buckets_of(buckets), 8)
    assert error.message == (
        "2 of 3 aspect buckets cannot fill the effective batch of 8 "
        "(train_batch_size x ranks / context_parallel_size x gradient_accumulation_steps):"
        "\n  1152x896: has 3, needs 8; smallest sufficient repeats: 2"
        "\n  64x64: has 2, needs 8; smallest sufficient repeats: 3"
    )
    assert error.hint.startswith("set repeats=3, or --allow_dataset_oversubscription")
    for way in ("train_batch_size", "gradient_accumulation_steps", "num_processes", "aspect_bucket_alignment", "crop"):
        assert way in error.hint


def test_the_repeats_that_a_bucket_already_has_count():
    # 2 pictures seen twice each are 4 entries; 8 need each seen 4 times, which is repeats=3
    assert "has 4, needs 8; smallest sufficient repeats: 3" in shortage(buckets_of({"64x64": [0, 0, 1, 1]}), 8).message


@given(st.integers(1, 12), st.integers(0, 4), st.integers(1, 100))
@hypothesis_settings(max_examples=300, deadline=None)
def test_the_repeats_that_the_error_asks_for_suffice(pictures, repeats, effective_batch_size):
    buckets = make_buckets(squares(pictures, repeats))
    size = len(buckets["64x64"])
    if size >= effective_batch_size:
        assert listed(fill_buckets(buckets, effective_batch_size, oversubscribe=False)) == listed(buckets)
        return
    advised = sufficient_repeats(buckets["64x64"], effective_batch_size)
    assert f"repeats: {advised}" in shortage(buckets, effective_batch_size).message
    enough = make_buckets(squares(pictures, advised))
    assert listed(fill_buckets(enough, effective_batch_size, oversubscribe=False)) == listed(enough)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9), st.integers(1, 100))
@hypothesis_settings(deadline=None)
def test_advised_repeats_suffice_in_a_bucket_that_two_datasets_share(mine, yours, repeats, other, effective_batch_size):
    parts = [drawn(*[(64, 64)] * mine, repeats=repeats), drawn(*[(64, 64)] * yours, dataset="e", repeats=other)]
    bucket = make_buckets(Samples(parts))["64x64"]
    if len(bucket) >= effective_batch_size:
        return
    advised = sufficient_repeats(bucket, effective_batch_size)
    assert (mine + yours) * (1 + advised) >= effective_batch_size


def test_the_repeats_that_the_error_asks_for_are_the_smallest():
    # 3 pictures seen twice are 6 entries; 8 need each seen 3 times (9), which is repeats=2, not 3
    assert "smallest sufficient repeats: 2" in shortage(buckets_of({"64x64": [0, 0, 1, 1, 2, 2]}), 8).message


def test_no_bucket_at_all_is_refused():
    with pytest.raises(DataError):
        fill_buckets({}, 8, oversubscribe=True)


def test_an_epoch_that_would_never_end_is_refused():
    with pytest.raises(DataError, match="an epoch would show 1,000,000,000,001 images"):
        make_buckets(squares(1, 10**12))


def test_samples_of_many_shapes_and_datasets_are_grouped_as_one_by_one():
    random = np.random.default_rng(0)
    for shapes, datasets, count in ((1, 1, 5), (40, 3, 3000), (300, 300, 5000)):  # 90,000 groups need 32 bits
        of_shape, of_dataset = random.integers(shapes, size=count), random.integers(datasets, size=count)
        copies = random.integers(1, 400, datasets).tolist()
        expected: dict[str, list[int]] = {}
        for index, (shape, dataset) in enumerate(zip(of_shape, of_dataset, strict=True)):
            expected.setdefault(f"{shape:03}", []).extend([index] * copies[dataset])
        names = [f"{number:03}" for number in range(shapes)]
        found = listed(group_samples(of_shape, names, of_dataset, copies))
        assert {name: items for name, items in found.items() if items} == expected
        assert list(found) == sorted(found)


def test_the_digest_changes_with_whatever_changes_the_order():
    samples = squares(300)
    buckets = buckets_of({"64x64": [*range(290), 5], "64x128": list(range(290, 300))})
    small = buckets_of({"64x64": [*range(290)], "64x128": [*range(290, 300)]})

    def with_other(at: int) -> Samples:
        return Samples(
            [drawn(*[(64, 64)] * count, first=first) for count, first in ((at, 0), (1, 300), (299 - at, at + 1))]
        )

    digests = [
        digest_buckets(buckets, samples, 3, 0),
        digest_buckets(buckets, samples, 3, 1),
        digest_buckets(small, samples, 3, 0),
        digest_buckets(fill_buckets(buckets, 16, oversubscribe=True), samples, 3, 0),
        *(digest_buckets(buckets, with_other(at), 3, 0) for at in (0, 5, 222, 299)),
        digest_buckets(buckets, Samples([drawn(*[(64, 64)] * 300, dataset="e")]), 3, 0),
    ]
    assert len(set(digests)) == len(digests)
    assert digest_buckets(buckets, squares(300), 3, 0) == digests[0]


def test_the_digest_of_names_does_not_depend_on_batches():
    whole = drawn(*[(64, 64)] * 10)
    table = pa.concat_tables([whole.table.slice(0, 3), whole.table.slice(3)])
    again = DatasetSamples(whole.dataset, whole.storage, table, whole.rows, whole.sizes, 0)
    assert Samples([again]).names_checksum() == Samples([whole]).names_checksum()
    every_other = np.arange(10) % 2 == 0
    assert Samples([again.where(every_other)]).names_checksum() == Samples([whole.where(every_other)]).names_checksum()
    assert Samples([whole.where(every_other)]).names_checksum() != Samples([whole]).names_checksum()


def test_the_checksum_of_samples_changes_with_all_that_decides_latents_and_captions():
    whole = drawn(*[(64, 64)] * 4)
    columns = ("name", "version", "captions")
    halves = pa.concat_tables([whole.table.slice(0, 1), whole.table.slice(1)])

    def other(**changes) -> DatasetSamples:
        values = {"dataset": whole.dataset, "table": whole.table, "rows": whole.rows, "sizes": whole.sizes, "seed": 0}
        return DatasetSamples(storage=whole.storage, **(values | changes))

    def column(name: str, values: list) -> pa.Table:
        index = whole.table.schema.get_field_index(name)
        return whole.table.set_column(index, name, pa.array(values, whole.table.schema.field(name).type))

    assert other(table=halves).checksum(*columns) == whole.checksum(*columns), "chunks of columns do not count"
    changes = [
        {"seed": 1},
        {"dataset": whole.dataset.model_copy(update={"crop": True})},
        {"rows": whole.rows[::-1]},
        {"sizes": replace(whole.sizes, targets=whole.sizes.targets + 64)},
        {"table": column("name", ["0.png", "1.png", "2.png", "4.png"])},
        {"table": column("version", ["1", "1", "1", "2"])},
        {"table": column("captions", [["c"], ["c"], ["c", "c"], []])},
        {"table": column("captions", [["c"], ["c"], ["c"], ["d"]])},
    ]
    checksums = {other(**change).checksum(*columns) for change in changes}
    assert len(checksums | {whole.checksum(*columns)}) == 1 + len(changes)
    assert other(**changes[-1]).checksum("name") == whole.checksum("name")
