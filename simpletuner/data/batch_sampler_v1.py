"""The order of data as version 0.1.0 had it, so that the runs that it began go on with the batches that it would take.

It differs in two things: all repeats of a bucket are shuffled together, and a batch takes the next items of the stream
as they come, so that it may hold a sample twice. A position is the number of items consumed of each bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from simpletuner.data.batch_sampler import EpochStream, GlobalBatchSampler, SamplerState


class PlainStream(EpochStream):
    """Items in their order."""

    def take(self, size: int) -> list[int]:
        """Return the next items."""
        return [self._pop() for _ in range(size)]


class GlobalBatchSamplerV1(GlobalBatchSampler):
    """The order of version 0.1.0."""

    def __init__(self, buckets: Mapping[str, Sequence[int]], seed: int) -> None:
        super().__init__(buckets, seed)
        self.buckets = {name: np.asarray(items) for name, items in sorted(buckets.items())}

    def resized(self, position: SamplerState, batch_size: int) -> SamplerState:
        """Return the same place in the data for another batch size: the rest of the epoch is divided again."""
        if batch_size == position.batch_size:
            return position
        consumed = dict(position.consumed)
        for name in self._turns(position, self._streams(position))[: position.batch]:
            consumed[name] += position.batch_size
        return SamplerState(position.epoch, 0, batch_size, consumed)

    def _streams(self, position: SamplerState) -> dict[str, EpochStream]:
        return {name: PlainStream((), self._items(name, position)) for name in self.buckets}

    def _items(self, name: str, position: SamplerState) -> np.ndarray:
        """Return a bucket's items from the first that is not consumed to the end of the epoch."""
        epoch, place = divmod(position.consumed[name], len(self.buckets[name]))
        epochs = [self._epoch(name, number) for number in range(epoch, position.epoch + 1)]
        return np.concatenate([*epochs, self.buckets[name][:0]])[place:]

    def _next_epoch(self, position: SamplerState, streams: Mapping[str, EpochStream]) -> SamplerState:
        following = super()._next_epoch(position, streams)
        return replace(following, carried={})

    def _epoch(self, name: str, epoch: int) -> np.ndarray:
        items = self.buckets[name]
        return items[self._random(name, epoch).permutation(len(items))]
