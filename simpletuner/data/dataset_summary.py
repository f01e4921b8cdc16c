"""What becomes of the images of each dataset, in numbers: buckets, repeats, crops, enlargement. Nothing is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simpletuner.data.buckets import Buckets
from simpletuner.data.dataset_warnings import enlargements
from simpletuner.data.samples import DatasetSamples, Samples, Sizes

MUCH_ENLARGED = 1.25
"""Above this factor an image visibly lacks detail."""


@dataclass(frozen=True)
class BucketSummary:
    """The images of one dataset in one bucket; shares of what is cropped away are of the whole image."""

    name: str
    images: int
    """Without those that are held out."""
    samples: float
    """How many of them an epoch shows, on average over epochs."""
    held_out: int
    mean_cropped: float
    most_cropped: float
    enlarged: int
    """More than MUCH_ENLARGED."""


@dataclass(frozen=True)
class DatasetSummary:
    """One dataset."""

    id: str
    address: str
    buckets: list[BucketSummary]

    @property
    def total(self) -> BucketSummary:
        """All buckets together."""
        counts = [bucket.images + bucket.held_out for bucket in self.buckets]
        means = [bucket.mean_cropped for bucket in self.buckets]
        return BucketSummary(
            "together",
            sum(bucket.images for bucket in self.buckets),
            sum(bucket.samples for bucket in self.buckets),
            sum(bucket.held_out for bucket in self.buckets),
            float(np.average(means, weights=counts)) if counts else 0.0,
            max((bucket.most_cropped for bucket in self.buckets), default=0.0),
            sum(bucket.enlarged for bucket in self.buckets),
        )


def cropped_away(sizes: Sizes) -> np.ndarray:
    """Return the share of an image of each size that its crop leaves out."""
    return 1 - sizes.targets.prod(axis=1) / sizes.resized.prod(axis=1)


def summarize(samples: Samples, buckets: Buckets, held_out: np.ndarray) -> list[DatasetSummary]:
    """Describe the datasets of a run; `buckets` and `held_out` (indices of samples) are those that it trains with."""
    starts = np.cumsum([0, *map(len, samples.parts)])
    shown = np.zeros(len(samples))
    for bucket in buckets.values():
        for copies, indices in bucket.groups.items():
            shown[indices] = float(bucket.passes * copies)
    is_held_out = np.zeros(len(samples), bool)
    is_held_out[held_out] = True
    return [
        DatasetSummary(
            part.dataset.id,
            part.storage.describe(),
            list(summarize_buckets(part, shown[start:end], is_held_out[start:end])),
        )
        for part, start, end in zip(samples.parts, starts, starts[1:], strict=False)
    ]


def summarize_buckets(part: DatasetSamples, shown: np.ndarray, is_held_out: np.ndarray) -> Iterator[BucketSummary]:
    """Yield the buckets of a dataset, the one with the most images first."""
    names, of_sizes = np.unique(part.sizes.targets, axis=0, return_inverse=True)
    of_images, cropped = of_sizes.reshape(-1)[part.sizes.index], cropped_away(part.sizes)[part.sizes.index]
    is_enlarged = (enlargements(part.sizes) > MUCH_ENLARGED)[part.sizes.index]
    counts = np.bincount(of_images, minlength=len(names))
    for number in np.argsort(-counts, kind="stable").tolist():
        if not counts[number]:  # a size of images that are left out
            continue
        own = of_images == number
        yield BucketSummary(
            name="{}x{}".format(*names[number].tolist()),
            images=int((own & ~is_held_out).sum()),
            samples=float(shown[own].sum()),
            held_out=int((own & is_held_out).sum()),
            mean_cropped=float(cropped[own].mean()),
            most_cropped=float(cropped[own].max()),
            enlarged=int((own & is_enlarged).sum()),
        )
