"""The global order: seed and position decide every global batch; it knows no ranks.

Each bucket is an endless stream of epochs. Within an epoch a sample that is shown m times comes once in each m-th part
of it, so equal repeats make m permutations, one after the other. Batches are cut from the stream in turn; a sample that
the batch holds already waits for the next one, so a batch holds doubles only where it has to. What does not fill a
batch opens the next epoch, so nothing is lost or doubled.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class SamplerState:
    """Where a run stands: `batch` batches of `batch_size` into the rest of `epoch`.

    The epoch began when `consumed` items of each bucket were taken, and with `carried` samples that were left over.
    `cuts` are the (batch size, batches) that it has seen before, if the batch size changed.
    """

    epoch: int
    batch: int
    batch_size: int
    consumed: Mapping[str, int]
    carried: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cuts: Sequence[Sequence[int]] = field(default_factory=list)


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step's samples as indices, with how often each occurred earlier in the same batch."""

    bucket: str
    samples: tuple[int, ...]
    occurrences: tuple[int, ...]


class EpochStream:
    """What is left of one bucket in one epoch: samples that wait, then `items` in their order."""

    def __init__(self, waiting: Sequence[int], items: np.ndarray) -> None:
        self.waiting, self.items, self.next_item = deque(waiting), items, 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.items) - self.next_item

    def take(self, size: int) -> list[int]:
        """Return a batch of `size`, each sample once as far as the next `2 * size` items allow."""
        batch: dict[int, None] = {}
        doubles: deque[int] = deque()
        while len(batch) < size and len(doubles) < size and len(self):
            sample = self._pop()
            if sample in batch:
                doubles.append(sample)
            else:
                batch[sample] = None
        filled = [*batch, *(doubles.popleft() for _ in range(min(size - len(batch), len(doubles))))]
        self.waiting.extendleft(reversed(doubles))
        return filled

    def rest(self) -> list[int]:
        """Return everything that is left, in its order."""
        return [*self.waiting, *self.items[self.next_item :].tolist()]

    def _pop(self) -> int:
        if self.waiting:
            return self.waiting.popleft()
        self.next_item += 1
        return int(self.items[self.next_item - 1])


class GlobalBatchSampler:
    """Yield global batches from any position, the same ones for every number of ranks."""

    def __init__(self, buckets: Mapping[str, Sequence[int]], seed: int) -> None:
        self.buckets = {name: np.sort(np.asarray(items, dtype=np.int64)) for name, items in sorted(buckets.items())}
        self.seed = seed

    def start(self, batch_size: int, epoch: int = 0) -> SamplerState:
        """Return the position of a new run, or of one that takes up these buckets at a later epoch."""
        return SamplerState(epoch, 0, batch_size, {name: epoch * len(items) for name, items in self.buckets.items()})

    def batches(self, position: SamplerState) -> Iterator[tuple[GlobalBatch, SamplerState]]:
        """Yield, for ever, each batch and the position after it."""
        streams = self._streams(position)
        while True:
            turns = self._turns(position, streams)
            for name in turns[: position.batch]:
                streams[name].take(position.batch_size)
            for index, name in enumerate(turns[position.batch :], start=position.batch + 1):
                samples = streams[name].take(position.batch_size)
                yield batch_of(name, samples), replace(position, batch=index)
            position = self._next_epoch(position, streams)
            streams = self._streams(position)

    def resized(self, position: SamplerState, batch_size: int) -> SamplerState:
        """Return the same place in the data for another batch size: the rest of the epoch is cut anew."""
        if batch_size == position.batch_size:
            return position
        cuts = [*position.cuts, [position.batch_size, position.batch]] if position.batch else position.cuts
        return replace(position, batch=0, batch_size=batch_size, cuts=cuts)

    def steps_of_epochs(self, epochs: int, batch_size: int) -> int:
        """Return how many batches the first `epochs` epochs hold."""
        return sum(epochs * len(items) // batch_size for items in self.buckets.values())

    def steps_left(self, position: SamplerState, epochs: int) -> int:
        """Return how many batches there are from a position to the end of the first `epochs` epochs."""
        streams, later = self._streams(position), epochs - position.epoch - 1
        left = (
            (len(stream) + later * len(self.buckets[name])) // position.batch_size for name, stream in streams.items()
        )
        return max(0, sum(left) - position.batch)

    def _streams(self, position: SamplerState) -> dict[str, EpochStream]:
        """Return what is left of each bucket in an epoch after its earlier cuts."""
        epoch = position.epoch
        streams = {name: EpochStream(position.carried.get(name, ()), self._epoch(name, epoch)) for name in self.buckets}
        for number, (size, batches) in enumerate(position.cuts):
            before = replace(position, batch_size=size, cuts=position.cuts[:number])
            for name in self._turns(before, streams)[:batches]:
                streams[name].take(size)
        return streams

    def _turns(self, position: SamplerState, streams: Mapping[str, EpochStream]) -> list[str]:
        """Return the bucket of every batch that what is left of an epoch fills: buckets take turns at random."""
        names = list(streams)
        counts = [len(streams[name]) // position.batch_size for name in names]
        turns = np.repeat(np.arange(len(names)), counts)
        key = f"turns/{len(position.cuts)}" if position.cuts else "turns"
        return [names[turn] for turn in self._random(key, position.epoch).permutation(turns)]

    def _next_epoch(self, position: SamplerState, streams: Mapping[str, EpochStream]) -> SamplerState:
        epoch = position.epoch + 1
        carried = {name: rest for name, stream in streams.items() if (rest := stream.rest())}
        consumed = {name: epoch * len(items) - len(carried.get(name, ())) for name, items in self.buckets.items()}
        return SamplerState(epoch, 0, position.batch_size, consumed, carried)

    def _epoch(self, name: str, epoch: int) -> np.ndarray:
        """Return a bucket's items of one epoch: the j-th of m showings of a sample lies in the j-th m-th part of it.

        Samples that are shown equally often are a new permutation in each part, evenly spread over it.
        """
        items, random = self.buckets[name], self._random(name, epoch)
        _, first, counts = np.unique(items, return_index=True, return_counts=True)
        showing, shows = np.arange(len(items)) - np.repeat(first, counts), np.repeat(counts, counts)
        shuffled = np.lexsort((random.random(len(items)), showing, shows))
        items, showing, shows = items[shuffled], showing[shuffled], shows[shuffled]
        opens_part = np.diff(showing, prepend=-1).astype(bool) | np.diff(shows, prepend=0).astype(bool)
        starts = np.flatnonzero(opens_part)
        sizes = np.diff(starts, append=len(items))
        place = np.arange(len(items)) - np.repeat(starts, sizes) + random.random(len(items))
        times = (showing + place / np.repeat(sizes, sizes)) / shows
        return items[np.argsort(times, kind="stable")]

    def _random(self, name: str, epoch: int) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{name}/{epoch}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))


def batch_of(bucket: str, samples: Sequence[int]) -> GlobalBatch:
    """Return a global batch, with how often each sample occurred before in it."""
    seen: Counter[int] = Counter()
    occurrences = []
    for sample in samples:
        occurrences.append(seen[sample])
        seen[sample] += 1
    return GlobalBatch(bucket, tuple(samples), tuple(occurrences))


def rank_slices(batch: GlobalBatch, rank: int, world_size: int, accumulation: int) -> list[list[int]]:
    """Return, for each forward pass of one rank, its places in the global batch."""
    per_pass = len(batch.samples) // accumulation
    per_rank = per_pass // world_size
    starts = (pass_index * per_pass + rank * per_rank for pass_index in range(accumulation))
    return [list(range(start, start + per_rank)) for start in starts]
