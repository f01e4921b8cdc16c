"""Statistics of each dataset: buckets, repeats, crops, enlargement. Nothing is decoded.

Captions are one Arrow column, for speed and memory: a sixth of the time of Python strings, and two thirds of
the memory, 0.9 GB for ten million captions of 68 letters.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.samples.buckets import Buckets, bucket_shapes
from simpletuner.data.samples.dataset_warnings import enlargements
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.data.samples.sizes import Sizes
from simpletuner.data.scan.captions import captions_of
from simpletuner.settings.values.shape import SampleShape

# Above this factor an image visibly lacks detail.
MUCH_ENLARGED = 1.25


@dataclass(frozen=True)
class BucketSummary:
    """The images of one dataset in one bucket; shares of what is cropped away are of the whole image."""

    name: str
    images: int
    """Images to train on, without held-out ones."""
    samples: float
    """Mean number of them in an epoch."""
    held_out: int
    mean_cropped: float
    most_cropped: float
    enlarged: int
    """More than MUCH_ENLARGED."""


@dataclass(frozen=True)
class DatasetSummary:
    id: str
    address: str
    buckets: list[BucketSummary]

    @property
    def total(self) -> BucketSummary:
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
    targets, resized = (np.multiply(*each.T, dtype=np.int64) for each in (sizes.targets, sizes.resized))
    return 1 - targets / resized


def summarize(samples: Samples, buckets: Buckets, held_out: np.ndarray) -> list[DatasetSummary]:
    """Describe the datasets of a run from its `buckets` and `held_out` sample indices."""
    starts = np.cumsum([0, *map(len, samples.parts)])
    shown = np.zeros(len(samples))
    for bucket in buckets.values():
        for copies, indices in bucket.groups.items():
            shown[indices] = float(bucket.passes * copies)
    is_held_out = np.zeros(len(samples), bool)
    is_held_out[held_out] = True
    shapes, of_samples = bucket_shapes(samples.parts) if samples.parts else ([], [])
    return [
        DatasetSummary(
            part.dataset.id,
            part.storage.describe(),
            list(summarize_buckets(part.sizes, shapes, of_own, shown[start:end], is_held_out[start:end])),
        )
        for part, of_own, start, end in zip(samples.parts, of_samples, starts, starts[1:], strict=False)
    ]


def summarize_buckets(
    sizes: Sizes, shapes: Sequence[SampleShape], of_samples: np.ndarray, shown: np.ndarray, is_held_out: np.ndarray
) -> Iterator[BucketSummary]:
    """Yield the buckets of a dataset that have samples of it, the one with the most first."""
    cropped, is_enlarged = cropped_away(sizes)[sizes.index], (enlargements(sizes) > MUCH_ENLARGED)[sizes.index]

    def totals(values: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(of_samples, values, len(shapes))

    counts, held_out, samples, enlarged = totals(), totals(is_held_out), totals(shown), totals(is_enlarged)
    sums, most = totals(cropped), np.zeros(len(shapes))
    np.maximum.at(most, of_samples, cropped)
    for number in sorted(np.flatnonzero(counts).tolist(), key=lambda number: (-counts[number], shapes[number])):
        yield BucketSummary(
            name=str(shapes[number]),
            images=int(counts[number] - held_out[number]),
            samples=float(samples[number]),
            held_out=int(held_out[number]),
            mean_cropped=float(sums[number] / counts[number]),
            most_cropped=float(most[number]),
            enlarged=int(enlarged[number]),
        )


# pyarrow comes without types.


# Rows that are converted to Python strings at once.
BLOCK = 1 << 14


class TextColumn(Sequence[str]):
    """Texts of an Arrow array in another order, decoded on access."""

    def __init__(self, texts: pa.Array, order: pa.Array) -> None:
        self._texts, self._order = texts, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._texts[self._order[position].as_py()].as_py()

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), BLOCK):
            yield from self._texts.take(self._order.slice(start, BLOCK)).to_pylist()


def different_captions(samples: Sequence[DatasetSamples], prompts: Sequence[str]) -> TextColumn:
    """Return all captions of these samples, and the prompts, each once, sorted as Python sorts texts."""
    blocks = [pa.array(prompts, pa.large_string())]
    blocks += [pc.unique(block) for part in samples for block in caption_blocks(part)]
    texts = pc.unique(pa.chunked_array(blocks))
    return TextColumn(texts, pc.array_sort_indices(texts))  # bytes of UTF-8 are in the order of code points


def texts_among_captions(samples: Sequence[DatasetSamples], texts: Sequence[str]) -> set[str]:
    wanted, found = pa.array(texts, pa.large_string()), set[str]()
    for block in (block for part in samples for block in caption_blocks(part)):
        found.update(block.filter(pc.is_in(block, wanted)).to_pylist())
    return found


def caption_blocks(samples: DatasetSamples) -> Iterator[pa.Array]:
    dataset = samples.dataset
    if dataset.caption_strategy == "instanceprompt":
        yield pa.array(captions_of(dataset, "", ()), pa.large_string())
        return
    table = samples.table.select(["name", "captions"])
    for start in range(0, len(samples.rows), BLOCK):
        rows = table.take(pa.array(samples.rows[start : start + BLOCK].astype(np.int64)))
        if are_as_stored(dataset):
            yield from pc.list_flatten(rows["captions"]).chunks
            continue
        pairs = zip(rows["name"].to_pylist(), rows["captions"].to_pylist(), strict=True)
        texts = [text for name, lines in pairs for text in captions_of(dataset, name, lines)]
        yield pa.array(texts, pa.large_string())


def are_as_stored(dataset: ImageDataset) -> bool:
    """True if captions are the scanned lines, unchanged."""
    is_changed = (
        dataset.caption_strategy == "filename"
        or dataset.caption_lines in ("one", "first")
        or dataset.caption_filter_list
        or (dataset.caption_shuffle and dataset.caption_shuffle.enable)
        or (dataset.prepend_instance_prompt and dataset.instance_prompt)
    )
    return not is_changed
