"""Group samples into aspect buckets, and refuse buckets that cannot fill the effective batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from simpletuner.data.samples import Sample
from simpletuner.errors import DataError

MAX_EPOCH_SAMPLES = 100_000_000

Buckets = dict[str, list[int]]
"""Bucket name such as `1024x1024` -> sample indices, each as often as an epoch shows it."""


def make_buckets(samples: Sequence[Sample], repeats: Mapping[str, int]) -> Buckets:
    """Group samples by their target size; `repeats` holds each dataset's extra passes per epoch.

    Raises DataError for an epoch too long to be held in memory.
    """
    shown = sum(1 + repeats[sample.dataset] for sample in samples)
    if shown > MAX_EPOCH_SAMPLES:
        raise DataError(f"an epoch would show {shown:,} images, more than {MAX_EPOCH_SAMPLES:,}", "lower repeats")
    buckets: Buckets = {}
    for index, sample in enumerate(samples):
        width, height = sample.geometry.target
        buckets.setdefault(f"{width}x{height}", []).extend([index] * (1 + repeats[sample.dataset]))
    return dict(sorted(buckets.items()))


def fill_buckets(buckets: Buckets, effective_batch_size: int, oversubscribe: bool) -> Buckets:
    """Return buckets that each fill the effective batch.

    Small ones are repeated as often as needed if `oversubscribe`; otherwise raises DataError with the numbers of each.
    """
    if not buckets:
        raise DataError("no image is left to train on")
    small = {name: items for name, items in buckets.items() if len(items) < effective_batch_size}
    if small and not oversubscribe:
        raise DataError(
            describe_shortage(small, len(buckets), effective_batch_size), suggest_fixes(small, effective_batch_size)
        )
    return {name: items * math.ceil(effective_batch_size / len(items)) for name, items in buckets.items()}


def describe_shortage(small: Buckets, total: int, effective_batch_size: int) -> str:
    lines = [
        f"\n  {name}: has {len(items)}, needs {effective_batch_size}; smallest sufficient repeats: "
        f"{sufficient_repeats(items, effective_batch_size)}"
        for name, items in small.items()
    ]
    return (
        f"{len(small)} of {total} aspect buckets cannot fill the effective batch of {effective_batch_size} "
        f"(train_batch_size x ranks / context_parallel_size x gradient_accumulation_steps):{''.join(lines)}"
    )


def sufficient_repeats(items: list[int], effective_batch_size: int) -> int:
    """Return the smallest `repeats` with which a bucket's images fill the batch."""
    return math.ceil(effective_batch_size / len(set(items))) - 1


def suggest_fixes(small: Buckets, effective_batch_size: int) -> str:
    """Return what the user can do, most precise first."""
    repeats = max(sufficient_repeats(items, effective_batch_size) for items in small.values())
    return (
        f"set repeats={repeats}, or --allow_dataset_oversubscription (repeats only small buckets), or lower "
        "train_batch_size, gradient_accumulation_steps or num_processes, or raise aspect_bucket_alignment, or crop=true"
    )
