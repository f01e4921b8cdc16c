"""Images held out of training, to measure the loss on: datasets of type eval, and a share of the others."""

from __future__ import annotations

import numpy as np

from simpletuner.data.sampler.batch_sampler import GlobalBatch, make_batch
from simpletuner.data.sampler.stable_choice import hash_names
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.settings.values.shape import SampleShape


def held_out_indices(samples: Samples, share: float) -> np.ndarray:
    """Return the indices of held-out samples, ascending."""
    parts, start = [np.zeros(0, np.int64)], 0
    for part in samples.parts:
        parts.append(start + held_out_of(part, share))
        start += len(part)
    return np.concatenate(parts)


def held_out_of(part: DatasetSamples, share: float) -> np.ndarray:
    """Return the held-out indices within one dataset: all of it, or a share, but at least one."""
    if part.dataset.dataset_type == "eval":
        return np.arange(len(part))
    if not share:
        return np.zeros(0, np.int64)
    # By id alone: what one run holds out, no other run of these images trains on, whatever is added to them.
    hashes = hash_names(part.names, part.dataset.id, "held out")
    chosen = np.flatnonzero(hashes < share * 2.0**64)
    return chosen if len(chosen) else hashes.argsort()[:1]


def held_out_batches(samples: Samples, held_out: np.ndarray, size: int) -> list[GlobalBatch]:
    """Cut held-out samples into batches of one shape and at most `size`."""
    by_shape: dict[SampleShape, list[int]] = {}
    for index in held_out.tolist():
        by_shape.setdefault(samples[index].shape, []).append(index)
    return [
        make_batch(str(shape), indices[first : first + size])
        for shape, indices in by_shape.items()
        for first in range(0, len(indices), size)
    ]
