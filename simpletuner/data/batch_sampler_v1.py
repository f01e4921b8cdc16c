"""The order of samples of version 0.1.0, so that runs begun by it continue with the batches that it would have taken.

All repeats of a bucket are shuffled together, and a batch takes the next items of the stream as they come, so it may
hold a sample twice. An epoch is an array. A position is the number of items consumed of each bucket when its epoch
began; the batches since then are taken again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from simpletuner.data.batch_sampler import GlobalBatch, GlobalBatchSampler, SamplerState, make_batch
from simpletuner.data.epoch_order import Bucket
from simpletuner.data.participation import NO_LIMIT


def listed_items(bucket: Bucket) -> np.ndarray:
    """Return a bucket's items as version 0.1.0 listed them: by sample, the whole repeated to fill a batch."""
    copies = [np.repeat(samples.astype(np.int64), int(count)) for count, samples in bucket.groups.items()]
    return np.tile(np.sort(np.concatenate(copies)), bucket.passes)


class GlobalBatchSamplerV1(GlobalBatchSampler):
    """The sampler of version 0.1.0."""

    def __init__(self, buckets: Mapping[str, Bucket], seed: int) -> None:
        super().__init__(buckets, seed)
        self.items = {name: listed_items(bucket) for name, bucket in self.buckets.items()}

    def start(self, batch_size: int, epoch: int = 0, step: int = 0) -> SamplerState:
        return SamplerState(epoch, 0, batch_size, {name: epoch * len(items) for name, items in self.items.items()})

    def batches(self, state: SamplerState) -> Iterator[tuple[GlobalBatch, SamplerState]]:
        while True:
            left, position = self._items_left(state), dict.fromkeys(self.items, 0)
            for index, name in enumerate(self._turns(state, left)):
                first, position[name] = position[name], position[name] + state.batch_size
                if index >= state.batch:
                    samples = left[name][first : position[name]].tolist()
                    yield make_batch(name, samples), replace(state, batch=index + 1)
            epoch = state.epoch + 1
            consumed = {
                name: epoch * len(items) - len(left[name]) + position[name] for name, items in self.items.items()
            }
            state = SamplerState(epoch, 0, state.batch_size, consumed)

    def with_batch_size(self, state: SamplerState, batch_size: int) -> SamplerState:
        if batch_size == state.batch_size:
            return state
        consumed = dict(state.consumed)
        for name in self._turns(state, self._items_left(state))[: state.batch]:
            consumed[name] += state.batch_size
        return SamplerState(state.epoch, 0, batch_size, consumed)

    def count_steps_left(self, state: SamplerState, epochs: int, max_steps: int = NO_LIMIT) -> int:
        later, items_left = epochs - state.epoch - 1, self._items_left(state)
        left = ((len(items) + later * len(self.items[name])) // state.batch_size for name, items in items_left.items())
        return max(0, sum(left) - state.batch)

    def contains(self, state: SamplerState) -> bool:
        if state.consumed.keys() != self.items.keys():
            return False
        return state.batch <= self.count_steps_left(replace(state, batch=0), state.epoch + 1)

    def _items_left(self, state: SamplerState) -> dict[str, np.ndarray]:
        """Return the items of each bucket from the first that is not consumed to the end of the epoch."""
        return {name: self._bucket_left(name, state) for name in self.items}

    def _bucket_left(self, name: str, state: SamplerState) -> np.ndarray:
        epoch, offset = divmod(state.consumed[name], len(self.items[name]))
        epochs = [self._epoch(name, number) for number in range(epoch, state.epoch + 1)]
        # The empty slice gives the result a dtype where `epochs` is empty.
        return np.concatenate([*epochs, self.items[name][:0]])[offset:]

    def _turns(self, state: SamplerState, left: Mapping[str, np.ndarray]) -> list[str]:
        """Return the bucket of every batch of what is left of an epoch."""
        names = list(left)
        turns = np.repeat(np.arange(len(names)), [len(left[name]) // state.batch_size for name in names])
        return [names[turn] for turn in self._random("turns", state.epoch).permutation(turns)]

    def _epoch(self, name: str, epoch: int) -> np.ndarray:
        items = self.items[name]
        return items[self._random(name, epoch).permutation(len(items))]

    def _random(self, name: str, epoch: int) -> np.random.Generator:
        # Philox keyed by a hash: independent streams per bucket and epoch, with no state to save.
        digest = hashlib.blake2b(f"{self.seed}/{name}/{epoch}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))
