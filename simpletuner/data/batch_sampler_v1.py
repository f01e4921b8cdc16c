"""The order of samples of version 0.1.0, so that runs begun by it continue with the batches that it would have taken.

It differs in two things: all repeats of a bucket are shuffled together, and a batch takes the next items of the stream
as they come, so it may hold a sample twice. A position is the number of items consumed of each bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from simpletuner.data.batch_sampler import EpochStream, GlobalBatchSampler, SamplerState


class PlainStream(EpochStream):
    """Items in order; duplicates are not put back."""

    def take(self, size: int) -> list[int]:
        return [self._pop() for _ in range(size)]


class GlobalBatchSamplerV1(GlobalBatchSampler):
    """The sampler of version 0.1.0."""

    def __init__(self, buckets: Mapping[str, Sequence[int]], seed: int) -> None:
        super().__init__(buckets, seed)
        # Version 0.1.0 did not sort items, and its permutations depend on their order.
        self.buckets = {name: np.asarray(items) for name, items in sorted(buckets.items())}

    def with_batch_size(self, state: SamplerState, batch_size: int) -> SamplerState:
        if batch_size == state.batch_size:
            return state
        consumed = dict(state.consumed)
        for name in self._turns(state, self._streams(state))[: state.batch]:
            consumed[name] += state.batch_size
        return SamplerState(state.epoch, 0, batch_size, consumed)

    def _streams(self, state: SamplerState) -> dict[str, EpochStream]:
        return {name: PlainStream((), self._items_left(name, state)) for name in self.buckets}

    def _items_left(self, name: str, state: SamplerState) -> np.ndarray:
        """Return a bucket's items from the first that is not consumed to the end of the epoch."""
        epoch, offset = divmod(state.consumed[name], len(self.buckets[name]))
        epochs = [self._epoch(name, number) for number in range(epoch, state.epoch + 1)]
        # The empty slice gives the result a dtype where `epochs` is empty.
        return np.concatenate([*epochs, self.buckets[name][:0]])[offset:]

    def _next_epoch(self, state: SamplerState, streams: Mapping[str, EpochStream]) -> SamplerState:
        return replace(super()._next_epoch(state, streams), carried={})

    def _epoch(self, name: str, epoch: int) -> np.ndarray:
        items = self.buckets[name]
        return items[self._random(name, epoch).permutation(len(items))]
