"""Group samples into aspect buckets, and refuse buckets that cannot fill the effective batch."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from operator import mul

import numpy as np

from simpletuner.data.config.dataset_parts import Copies, copies_per_epoch
from simpletuner.data.sampler.epoch_order import Bucket
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.data.samples.sizes import different_values
from simpletuner.errors import DataError
from simpletuner.settings.values.shape import SampleShape, Shape

# More is a mistake in `repeats`: at 1,000 samples per second, such an epoch takes four months.
MAX_EPOCH_SAMPLES = 10**10

# By the name of its SampleShape, such as `1024x1024`, or `832x480@81` of clips.
Buckets = dict[str, Bucket]


def shape_of(code: int) -> Shape:
    return Shape(code >> 48 & 0x7FFF, code & 0xFFFFFF, code >> 24 & 0xFFFFFF)


def make_buckets(
    samples: Samples, held_out: Sequence[int] | np.ndarray = (), active: Collection[str] | None = None
) -> Buckets:
    """Group samples but the held-out ones by target size, and by the copies of their dataset in an epoch.

    `active` are the ids of the datasets that take part; by default all do.
    """
    if not samples.parts:
        return {}
    shapes, of_samples = bucket_shapes(samples.parts)
    names = list(map(str, shapes))
    copies = copies_per_epoch([part.dataset for part in samples.parts])
    datasets = np.repeat(np.arange(len(samples.parts), dtype=np.uint16), [len(part) for part in samples.parts])
    if active is not None:
        copies = [own if part.dataset.id in active else 0 for own, part in zip(copies, samples.parts, strict=True)]
    if not len(held_out):
        return group_samples(np.concatenate(of_samples), names, datasets, copies)
    trained = np.delete(np.arange(len(samples), dtype=np.uint32), held_out)
    buckets = group_samples(np.concatenate(of_samples)[trained], names, datasets[trained], copies)
    return {
        name: Bucket({count: trained[own] for count, own in bucket.groups.items()}) for name, bucket in buckets.items()
    }


def bucket_shapes(parts: Sequence[DatasetSamples]) -> tuple[list[SampleShape], list[np.ndarray]]:
    """Return the shapes of all buckets, and by dataset which of them each sample is in, (samples,) uint32."""
    targets = [part.sizes.target_codes for part in parts]
    codes, of_sizes = different_values(np.concatenate(targets))
    of_parts = np.split(of_sizes.astype(np.uint32), np.cumsum([len(each) for each in targets])[:-1])
    of_samples = [own[part.sizes.index] for own, part in zip(of_parts, parts, strict=True)]
    plain = [SampleShape(shape_of(code), has_sound=code < 0) for code in codes.tolist()]
    numbers = {shape: number for number, shape in enumerate(plain)}
    # A batch has a first frame of each clip or of none. Where all clips have one, their buckets keep the
    # plain names: only the model may say so, which is opened when they are made already.
    are_mixed = len({part.dataset.is_i2v for part in parts if part.dataset.clips}) > 1
    for number, part in enumerate(parts):
        if part.references:
            own, of_own = with_references(plain, of_samples[number], part)
        elif are_mixed and part.dataset.is_i2v:
            own, of_own = [each._replace(has_first_frame=True) for each in plain], of_samples[number]
        else:
            continue
        of_samples[number] = np.array([numbers.setdefault(each, len(numbers)) for each in own], np.uint32)[of_own]
    return list(numbers), of_samples


def with_references(
    targets: Sequence[SampleShape], of_samples: np.ndarray, part: DatasetSamples
) -> tuple[list[SampleShape], np.ndarray]:
    """Shapes of buckets with references of one shape each, and the bucket of each sample."""
    keys = of_samples.astype(np.int64)
    options: list[list[Shape]] = []
    for references in part.references:
        if references.sizes is None:  # cropped as its image
            options.append([])
            continue
        codes, of_sizes = different_values(references.sizes.target_codes)
        options.append([shape_of(code) for code in codes.tolist()])
        keys = keys * len(codes) + of_sizes[references.sizes.index[references.rows[part.rows]]]
    found, of_own = np.unique(keys, return_inverse=True)
    own: list[SampleShape] = []
    for key in found.tolist():
        shown: list[Shape | None] = []
        for choices in reversed(options):
            key, place = divmod(key, len(choices) or 1)
            shown.append(choices[place] if choices else None)
        target = targets[key].target
        own.append(SampleShape(target, tuple(each or target for each in reversed(shown))))
    return own, of_own


def group_samples(shapes: np.ndarray, names: Sequence[str], datasets: np.ndarray, copies: Sequence[Copies]) -> Buckets:
    """Group samples by shape and by their number of copies in an epoch.

    `shapes` and `datasets` are (samples,) indices into `names`, the buckets' names, and `copies`, the copies
    of each dataset's samples. Raises DataError for an epoch that would never end.
    """
    shown = sum(map(mul, copies, np.bincount(datasets, minlength=len(copies)).tolist()))
    if shown > MAX_EPOCH_SAMPLES:
        raise DataError(f"an epoch would show {int(shown):,} images, more than {MAX_EPOCH_SAMPLES:,}", "lower repeats")
    # Samples of one shape and number of copies are a group, from any dataset: the order needs no more.
    counts = sorted(set(copies))
    groups = len(names) * len(counts)
    dtype = np.min_scalar_type(groups)  # numpy sorts 16 bits by radix, five times as fast as 64
    of_dataset = np.array([counts.index(count) for count in copies], dtype)
    group = shapes.astype(dtype) * dtype.type(len(counts)) + of_dataset[datasets]
    ordered = np.argsort(group, kind="stable").astype(np.uint32)
    parts = np.split(ordered, np.cumsum(np.bincount(group, minlength=groups))[:-1])
    buckets = {
        name: Bucket({count: part for count, part in zip(counts, parts[first:], strict=False) if count and len(part)})
        for name, first in zip(names, range(0, groups, len(counts)), strict=True)
    }
    return {name: bucket for name, bucket in sorted(buckets.items()) if bucket.groups}


def digest_buckets(buckets: Buckets, samples: Samples, *identity: object) -> str:
    """Fingerprint (16 hex digits) of `identity`, and of a bucket's samples with their repeats."""
    digest = hashlib.blake2b(repr((identity, samples.names_checksum())).encode(), digest_size=8)
    for name, bucket in buckets.items():
        for copies, indices in bucket.groups.items():
            digest.update(repr((name, bucket.passes, copies, len(indices))).encode())
            digest.update(indices.astype(np.uint32).tobytes())
    return digest.hexdigest()


def fill_buckets(buckets: Buckets, effective_batch_size: int, oversubscribe: bool) -> Buckets:
    """Return buckets that each fill the effective batch.

    Small ones are repeated as often as needed if `oversubscribe`; otherwise raises DataError with the numbers
    of each.
    """
    if not buckets:
        raise DataError("no image is left to train on")
    small = {name: bucket for name, bucket in buckets.items() if len(bucket) < effective_batch_size}
    if small and not oversubscribe:
        raise DataError(
            describe_shortage(small, len(buckets), effective_batch_size), suggest_fixes(small, effective_batch_size)
        )
    return {
        name: replace(bucket, passes=bucket.passes * sufficient_passes(bucket, effective_batch_size))
        for name, bucket in buckets.items()
    }


def sufficient_passes(bucket: Bucket, effective_batch_size: int) -> int:
    # An epoch of a fractional group may have up to one item less than on average.
    average = bucket.passes * sum(copies * len(samples) for copies, samples in bucket.groups.items())
    most = math.ceil((effective_batch_size + len(bucket.groups)) / average)
    return 1 + bisect_left(
        range(1, most), effective_batch_size, key=lambda passes: len(replace(bucket, passes=bucket.passes * passes))
    )


def describe_shortage(small: Buckets, total: int, effective_batch_size: int) -> str:
    lines = [
        f"\n  {name}: has {len(bucket)}, needs {effective_batch_size}; smallest sufficient repeats: "
        f"{sufficient_repeats(bucket, effective_batch_size)}"
        for name, bucket in small.items()
    ]
    return (
        f"{len(small)} of {total} aspect buckets cannot fill the effective batch of {effective_batch_size} "
        f"(train_batch_size x ranks / context_parallel_size x gradient_accumulation_steps):{''.join(lines)}"
    )


def sufficient_repeats(bucket: Bucket, effective_batch_size: int) -> int:
    """Smallest `repeats` that fill the batch from a bucket, if all images have the same probability."""
    return math.ceil(effective_batch_size / bucket.num_samples) - 1


def suggest_fixes(small: Buckets, effective_batch_size: int) -> str:
    """Advice for small buckets, most precise first."""
    repeats = max(sufficient_repeats(bucket, effective_batch_size) for bucket in small.values())
    weights = any(isinstance(copies, Fraction) for bucket in small.values() for copies in bucket.groups)
    return (
        f"set repeats={repeats}{' and probability=1' * weights}, or --allow_dataset_oversubscription (repeats only "
        "small buckets), or lower train_batch_size, gradient_accumulation_steps or num_processes, or raise "
        "aspect_bucket_alignment, or crop=true"
    )
