from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from buckets import bucket_of

from simpletuner.data.batch_sampler import SamplerState
from simpletuner.data.batch_sampler_v1 import GlobalBatchSamplerV1, listed_items
from simpletuner.data.dataset_kinds import LocalImages
from simpletuner.data.epoch_order import Bucket
from simpletuner.data.geometry import bucket_sizes

CASES = json.loads((Path(__file__).parent / "order_v1.json").read_text())
"""Batches that the code of version 0.1.0 (commit f0e50b6) took, with the position after each as it saved it."""


def listed_bucket(items: list[int]) -> Bucket:
    """Return the bucket that version 0.1.0 listed: with repeats, which are adjacent, or repeated as a whole."""
    passes = 1 if items == sorted(items) else items.count(items[0])
    return replace(bucket_of(items[: len(items) // passes]), passes=passes)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_version_0_1_began_goes_on_with_the_batches_that_it_would_take(case):
    buckets = {name: listed_bucket(items) for name, items in case["buckets"].items()}
    assert {name: listed_items(bucket).tolist() for name, bucket in buckets.items()} == case["buckets"]
    order = GlobalBatchSamplerV1(buckets, case["seed"])

    def following(position: SamplerState, count: int) -> list:
        found = [[batch.bucket, list(batch.samples), after] for batch, after in islice(order.batches(position), count)]
        return [
            [name, samples, {key: asdict(after)[key] for key in CASES[0]["batches"][0][2]}]
            for name, samples, after in found
        ]

    rows = case["batches"]
    assert following(order.start(case["batch_size"]), len(rows)) == rows
    for number in (0, 4, 7):
        assert following(SamplerState(**rows[number][2]), 3) == rows[number + 1 : number + 4]
    larger = case["after 5 with a larger batch"]
    position = order.with_batch_size(SamplerState(**rows[4][2]), case["batch_size"] + 1)
    assert following(position, len(larger)) == larger


def test_buckets_of_version_0_1_round_each_side_by_itself():
    dataset = LocalImages(id="d", instance_data_dir=Path("x"), resolution=1024)
    size = np.array([(4032, 3024)])
    assert bucket_sizes(dataset, size, 64, version=1).tolist() == [[1152, 896]]
    assert bucket_sizes(dataset, size, 64).tolist() == [[1216, 896]]
