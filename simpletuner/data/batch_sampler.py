"""The global order of samples: a seed and a state decide every global batch, whatever the number of ranks.

Each bucket is an endless stream of epochs. Within an epoch, a sample with m repeats occurs once in each m-th part of
it, so equal repeats make m permutations, one after the other. Batches are cut from the stream in turn. A sample that
the batch already holds waits for the next batch, so a batch holds duplicates only where it has to. What does not fill
a batch at the end of an epoch opens the next epoch, so no sample is lost or shown twice as often.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

DATA_VERSION = 2
"""Version of what decides buckets and the order of samples; a run keeps the one that it began with (`data_version` in
state.json), since a position means something only in the order that it was counted in.

1: each side of a bucket is rounded by itself, and all repeats are shuffled together (simpletuner 0.1.0).
2: the bucket that crops least, and repeats spread over the epoch.
"""


@dataclass(frozen=True)
class SamplerState:
    """A position in the data: `batch` batches of `batch_size` into what is left of `epoch`.

    The epoch began after `consumed` items of each bucket, with `carried` samples left over from the epoch before.
    `cuts` are the (batch size, batches) already taken from this epoch with other batch sizes. Saved in state.json
    under these names.
    """

    epoch: int
    batch: int
    batch_size: int
    consumed: Mapping[str, int]
    carried: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cuts: Sequence[Sequence[int]] = field(default_factory=list)


@dataclass(frozen=True)
class GlobalBatch:
    """The sample indices of one optimizer step, with how often each occurred earlier in the same batch."""

    bucket: str
    samples: tuple[int, ...]
    occurrences: tuple[int, ...]


class EpochStream:
    """What is left of one bucket in one epoch: samples that were put back, then `items` in order."""

    def __init__(self, waiting: Sequence[int], items: np.ndarray) -> None:
        self.waiting, self.items, self.next_item = deque(waiting), items, 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.items) - self.next_item

    def take(self, size: int) -> list[int]:
        batch: dict[int, None] = {}  # a set that keeps insertion order
        duplicates: deque[int] = deque()
        # Looking further than `size` duplicates ahead would read a whole epoch to fill one batch of a small bucket.
        while len(batch) < size and len(duplicates) < size and len(self):
            sample = self._pop()
            if sample in batch:
                duplicates.append(sample)
            else:
                batch[sample] = None
        taken = [*batch, *(duplicates.popleft() for _ in range(min(size - len(batch), len(duplicates))))]
        self.waiting.extendleft(reversed(duplicates))
        return taken

    def remaining(self) -> list[int]:
        return [*self.waiting, *self.items[self.next_item :].tolist()]

    def _pop(self) -> int:
        if self.waiting:
            return self.waiting.popleft()
        self.next_item += 1
        return int(self.items[self.next_item - 1])


class GlobalBatchSampler:
    """Yield global batches from any state; `buckets` hold sample indices, each as often as an epoch shows it."""

    def __init__(self, buckets: Mapping[str, Sequence[int]], seed: int) -> None:
        # Sorted, so that neither the order of datasets nor that of repeats changes the permutations.
        self.buckets = {name: np.sort(np.asarray(items, dtype=np.int64)) for name, items in sorted(buckets.items())}
        self.seed = seed

    def start(self, batch_size: int, epoch: int = 0) -> SamplerState:
        """Return the state at the start of an epoch: of a new run, or of one that goes on with other data."""
        return SamplerState(epoch, 0, batch_size, {name: epoch * len(items) for name, items in self.buckets.items()})

    def batches(self, state: SamplerState) -> Iterator[tuple[GlobalBatch, SamplerState]]:
        """Yield each batch with the state after it. Never ends."""
        streams = self._streams(state)
        while True:
            turns = self._turns(state, streams)
            for name in turns[: state.batch]:
                streams[name].take(state.batch_size)
            for index, name in enumerate(turns[state.batch :], start=state.batch + 1):
                samples = streams[name].take(state.batch_size)
                yield make_batch(name, samples), replace(state, batch=index)
            state = self._next_epoch(state, streams)
            streams = self._streams(state)

    def with_batch_size(self, state: SamplerState, batch_size: int) -> SamplerState:
        """Return the same position for another batch size: what is left of the epoch is cut into new batches."""
        if batch_size == state.batch_size:
            return state
        cuts = [*state.cuts, [state.batch_size, state.batch]] if state.batch else state.cuts
        return replace(state, batch=0, batch_size=batch_size, cuts=cuts)

    def count_steps(self, epochs: int, batch_size: int) -> int:
        """Return how many batches the first `epochs` epochs hold."""
        return sum(epochs * len(items) // batch_size for items in self.buckets.values())

    def count_steps_left(self, state: SamplerState, epochs: int) -> int:
        """Return how many batches there are from `state` to the end of the first `epochs` epochs."""
        streams, later = self._streams(state), epochs - state.epoch - 1
        left = ((len(stream) + later * len(self.buckets[name])) // state.batch_size for name, stream in streams.items())
        return max(0, sum(left) - state.batch)

    def _streams(self, state: SamplerState) -> dict[str, EpochStream]:
        # Earlier cuts are replayed rather than saved: the state stays a few numbers, however large the data is.
        epoch = state.epoch
        streams = {name: EpochStream(state.carried.get(name, ()), self._epoch(name, epoch)) for name in self.buckets}
        for number, (size, batches) in enumerate(state.cuts):
            before = replace(state, batch_size=size, cuts=state.cuts[:number])
            for name in self._turns(before, streams)[:batches]:
                streams[name].take(size)
        return streams

    def _turns(self, state: SamplerState, streams: Mapping[str, EpochStream]) -> list[str]:
        """Return the bucket of every batch that is left of an epoch; buckets take turns at random."""
        names = list(streams)
        counts = [len(streams[name]) // state.batch_size for name in names]
        turns = np.repeat(np.arange(len(names)), counts)
        key = f"turns/{len(state.cuts)}" if state.cuts else "turns"
        return [names[turn] for turn in self._random(key, state.epoch).permutation(turns)]

    def _next_epoch(self, state: SamplerState, streams: Mapping[str, EpochStream]) -> SamplerState:
        epoch = state.epoch + 1
        carried = {name: rest for name, stream in streams.items() if (rest := stream.remaining())}
        consumed = {name: epoch * len(items) - len(carried.get(name, ())) for name, items in self.buckets.items()}
        return SamplerState(epoch, 0, state.batch_size, consumed, carried)

    def _epoch(self, name: str, epoch: int) -> np.ndarray:
        """Return a bucket's items of one epoch, in order.

        Samples with the same number of repeats m form m permutations, one in each m-th part of the epoch. Each item
        gets a time in [0, 1) that is evenly spread over its part, and sorting by time merges the groups.
        """
        items, random = self.buckets[name], self._random(name, epoch)
        _, first, counts = np.unique(items, return_index=True, return_counts=True)
        # `items` is sorted, so an item's distance from its first copy numbers the copies 0..m-1.
        copy, copies = np.arange(len(items)) - np.repeat(first, counts), np.repeat(counts, counts)
        shuffled = np.lexsort((random.random(len(items)), copy, copies))
        items, copy, copies = items[shuffled], copy[shuffled], copies[shuffled]
        opens_part = np.diff(copy, prepend=-1).astype(bool) | np.diff(copies, prepend=0).astype(bool)
        starts = np.flatnonzero(opens_part)
        sizes = np.diff(starts, append=len(items))
        rank_in_part = np.arange(len(items)) - np.repeat(starts, sizes) + random.random(len(items))
        times = (copy + rank_in_part / np.repeat(sizes, sizes)) / copies
        return items[np.argsort(times, kind="stable")]

    def _random(self, name: str, epoch: int) -> np.random.Generator:
        # Philox keyed by a hash: independent streams per bucket and epoch, with no state to save.
        digest = hashlib.blake2b(f"{self.seed}/{name}/{epoch}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))


def make_batch(bucket: str, samples: Sequence[int]) -> GlobalBatch:
    seen: Counter[int] = Counter()
    occurrences = []
    for sample in samples:
        occurrences.append(seen[sample])
        seen[sample] += 1
    return GlobalBatch(bucket, tuple(samples), tuple(occurrences))


def split_for_rank(batch: GlobalBatch, data_rank: int, data_size: int, accumulation: int) -> list[list[int]]:
    """Return, for each micro batch of one data rank, its indices into the global batch.

    Micro batches are contiguous and ranks are contiguous within them, so the gradient of a step is the same mean over
    the same samples for any number of ranks and accumulation steps.
    """
    per_micro_batch = len(batch.samples) // accumulation
    per_rank = per_micro_batch // data_size
    starts = (number * per_micro_batch + data_rank * per_rank for number in range(accumulation))
    return [list(range(start, start + per_rank)) for start in starts]
