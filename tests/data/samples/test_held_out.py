from __future__ import annotations

from collections import Counter

import numpy as np
from buckets import listed_items
from hypothesis import given
from hypothesis import strategies as st
from scanning import drawn

from simpletuner.data.samples.buckets import make_buckets
from simpletuner.data.samples.samples import Samples, held_out_batches, held_out_indices


def ids(samples: Samples, indices: np.ndarray) -> set[str]:
    return {samples[index].id for index in indices.tolist()}


def test_a_share_is_chosen_by_id_so_that_added_images_move_no_other():
    few, many = (Samples([drawn(*[(64, 64)] * count)]) for count in (600, 1000))
    chosen, among_more = held_out_indices(few, 0.1), held_out_indices(many, 0.1)
    assert 40 <= len(chosen) <= 80 and 70 <= len(among_more) <= 130
    assert ids(few, chosen) == ids(many, among_more) & {sample.id for sample in few}
    assert ids(few, chosen) <= ids(few, held_out_indices(few, 0.2))
    assert len(held_out_indices(few, 0.0)) == 0
    assert len(held_out_indices(Samples([drawn(*[(64, 64)] * 9)]), 0.0001)) == 1, "else there would be no loss to see"


@given(st.lists(st.sampled_from([(64, 64), (128, 64), (64, 128)]), min_size=1, max_size=40), st.floats(0, 0.9))
def test_each_sample_is_either_trained_on_or_held_out(sizes, share):
    samples = Samples([drawn(*sizes, repeats=1), drawn((64, 64), dataset="e")])
    held_out = held_out_indices(samples, share)
    buckets = make_buckets(samples, held_out)
    trained = Counter(item for bucket in buckets.values() for item in listed_items(bucket).tolist())
    assert trained.keys() == {*range(len(samples))} - {*held_out.tolist()}
    assert all(count == (2 if index < len(sizes) else 1) for index, count in trained.items())
    for name, bucket in buckets.items():
        shapes = {samples[index].geometry.target for index in listed_items(bucket).tolist()}
        assert set(map(str, shapes)) == {name}
    batches = held_out_batches(samples, held_out, 3)
    assert sorted(index for batch in batches for index in batch.samples) == held_out.tolist()
    for batch in batches:
        assert len(batch.samples) <= 3 and len({samples[index].geometry.target for index in batch.samples}) == 1
