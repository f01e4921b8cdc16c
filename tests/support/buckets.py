"""Buckets from lists of sample indices, each as often as an epoch shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler
from simpletuner.data.sampler.epoch_order import Bucket


def bucket_of(items: Sequence[int]) -> Bucket:
    groups: dict[int, list[int]] = {}
    for sample, copies in sorted(Counter(items).items()):
        groups.setdefault(copies, []).append(sample)
    return Bucket({copies: np.array(samples, np.uint32) for copies, samples in sorted(groups.items())})


def listed_items(bucket: Bucket) -> np.ndarray:
    """Return a bucket's items by sample, the whole repeated to fill a batch."""
    items = np.concatenate([np.repeat(samples, copies) for copies, samples in bucket.groups.items()])
    return np.tile(items[np.argsort(items, kind="stable")], bucket.passes)


def sampler_of(buckets: Mapping[str, Sequence[int]], seed: int) -> GlobalBatchSampler:
    return GlobalBatchSampler({name: bucket_of(items) for name, items in buckets.items()}, seed)
