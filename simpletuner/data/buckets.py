"""Group samples of one shape, and refuse groups that cannot fill the effective batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from simpletuner.data.discovery import Sample
from simpletuner.errors import DataError

Buckets = dict[str, list[int]]
"""Bucket name such as `1024x1024` -> sample indices, each as often as an epoch shows it."""


def group(samples: Sequence[Sample], repeats: Mapping[str, int]) -> Buckets:
    """Return the buckets; `repeats` holds each dataset's extra passes per epoch."""
    buckets: Buckets = {}
    for index, sample in enumerate(samples):
        width, height = sample.geometry.target
        buckets.setdefault(f"{width}x{height}", []).extend([index] * (1 + repeats[sample.dataset]))
    return dict(sorted(buckets.items()))


def filled(buckets: Buckets, effective_batch_size: int, oversubscribe: bool) -> Buckets:
    """Return buckets that each fill the effective batch.

    Small ones are repeated as often as needed if `oversubscribe`; otherwise raises DataError with the numbers of each.
    """
    factors = {name: math.ceil(effective_batch_size / len(items)) for name, items in buckets.items()}
    if not oversubscribe and any(factor > 1 for factor in factors.values()):
        raise DataError(shortage(buckets, factors, effective_batch_size), ways_out(buckets, factors))
    return {name: items * factors[name] for name, items in buckets.items()}


def shortage(buckets: Buckets, factors: Mapping[str, int], effective_batch_size: int) -> str:
    """Return the message that says what each small bucket has and lacks."""
    lines = [
        f"\n  {name}: has {len(buckets[name])}, needs {effective_batch_size}; smallest sufficient repeats: "
        f"{needed_repeats(buckets[name], factor)}"
        for name, factor in factors.items()
        if factor > 1
    ]
    return (
        f"{len(lines)} of {len(buckets)} aspect buckets cannot fill the effective batch of {effective_batch_size} "
        f"(train_batch_size x ranks x gradient_accumulation_steps):{''.join(lines)}"
    )


def needed_repeats(items: list[int], factor: int) -> int:
    """Return the `repeats` setting that makes the bucket large enough, given the repeats it already has."""
    passes = len(items) // len(set(items))
    return math.ceil(len(items) * factor / len(set(items)) / passes) * passes - 1


def ways_out(buckets: Buckets, factors: Mapping[str, int]) -> str:
    """Return what the user can do, most precise first."""
    repeats = max(needed_repeats(buckets[name], factor) for name, factor in factors.items())
    return (
        f"set repeats={repeats}, or --allow_dataset_oversubscription (repeats only small buckets), or lower "
        "train_batch_size, gradient_accumulation_steps or num_processes, or raise aspect_bucket_alignment, or crop=true"
    )
