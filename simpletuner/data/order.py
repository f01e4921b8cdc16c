"""The global order: (seed, epoch, position) decides every global batch; it knows no ranks.

Each bucket is an endless stream: its items shuffled anew for every epoch, one epoch after the other. Batches are cut
from the streams, and an epoch holds the batches that can be completed from what it and the epochs before have brought.
What does not fill a batch opens the next epoch, so nothing is lost or doubled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Position:
    """Where a run stands: `batch` batches of `batch_size` into `epoch`, whose plan began with `consumed` per bucket."""

    epoch: int
    batch: int
    batch_size: int
    consumed: Mapping[str, int]


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step's samples as indices, with how often each occurred earlier in the same batch."""

    bucket: str
    samples: tuple[int, ...]
    occurrences: tuple[int, ...]


class Order:
    """Yield global batches from any position, the same ones for every number of ranks."""

    def __init__(self, buckets: Mapping[str, Sequence[int]], seed: int) -> None:
        self.buckets = {name: np.asarray(items) for name, items in sorted(buckets.items())}
        self.seed = seed
        self._permutations: dict[tuple[str, int], np.ndarray] = {}

    def start(self, batch_size: int, epoch: int = 0) -> Position:
        """Return the position of a new run, or of one that takes up these buckets at a later epoch."""
        return Position(epoch, 0, batch_size, {name: epoch * len(items) for name, items in self.buckets.items()})

    def plan(self, position: Position) -> list[tuple[str, int]]:
        """Return the epoch's batches as (bucket, first item in the bucket's stream).

        Buckets take turns at random, but each is read in the order of its stream (whose items are shuffled already), so
        that the items taken so far are always its first ones.
        """
        size, consumed = position.batch_size, position.consumed
        counts = {name: ((position.epoch + 1) * len(b) - consumed[name]) // size for name, b in self.buckets.items()}
        turns = np.repeat(np.arange(len(counts)), list(counts.values()))
        starts = {
            name: iter(range(consumed[name], consumed[name] + count * size, size)) for name, count in counts.items()
        }
        names = [list(counts)[turn] for turn in self._random("turns", position.epoch).permutation(turns)]
        return [(name, next(starts[name])) for name in names]

    def batches(self, position: Position) -> Iterator[tuple[GlobalBatch, Position]]:
        """Yield, for ever, each batch and the position after it."""
        while True:
            plan = self.plan(position)
            for index in range(position.batch, len(plan)):
                name, start = plan[index]
                yield self._batch(name, start, position.batch_size), replace(position, batch=index + 1)
            position = self._next_epoch(position, plan)

    def resized(self, position: Position, batch_size: int) -> Position:
        """Return the same place in the data for another batch size: the rest of the epoch is cut anew."""
        if batch_size == position.batch_size:
            return position
        taken = self.plan(position)[: position.batch]
        return Position(position.epoch, 0, batch_size, self._consumed(position, taken))

    def steps_of_epochs(self, epochs: int, batch_size: int) -> int:
        """Return how many batches the first `epochs` epochs hold."""
        return sum(epochs * len(items) // batch_size for items in self.buckets.values())

    def steps_until(self, position: Position, epochs: int) -> int:
        """Return how many batches follow a position until the end of `epochs` epochs."""
        size, consumed = position.batch_size, position.consumed
        left = ((epochs * len(items) - consumed[name]) // size for name, items in self.buckets.items())
        return max(0, sum(max(0, count) for count in left) - position.batch)

    def _next_epoch(self, position: Position, plan: list[tuple[str, int]]) -> Position:
        return Position(position.epoch + 1, 0, position.batch_size, self._consumed(position, plan))

    def _consumed(self, position: Position, taken: list[tuple[str, int]]) -> dict[str, int]:
        counts = dict(position.consumed)
        for name, _ in taken:
            counts[name] += position.batch_size
        return counts

    def _batch(self, name: str, start: int, batch_size: int) -> GlobalBatch:
        samples = [self._item(name, index) for index in range(start, start + batch_size)]
        occurrences = [samples[:index].count(sample) for index, sample in enumerate(samples)]
        return GlobalBatch(name, tuple(samples), tuple(occurrences))

    def _item(self, name: str, index: int) -> int:
        epoch, place = divmod(index, len(self.buckets[name]))
        return int(self.buckets[name][self._permutation(name, epoch)[place]])

    def _permutation(self, name: str, epoch: int) -> np.ndarray:
        key = (name, epoch)
        if key not in self._permutations:  # a batch spans at most a few epochs: older ones are not asked for again
            self._permutations.pop((name, epoch - 2), None)
            self._permutations[key] = self._random(name, epoch).permutation(len(self.buckets[name]))
        return self._permutations[key]

    def _random(self, name: str, epoch: int) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{name}/{epoch}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))


def rank_slices(batch: GlobalBatch, rank: int, world_size: int, accumulation: int) -> list[list[int]]:
    """Return, for each forward pass of one rank, its places in the global batch."""
    per_pass = len(batch.samples) // accumulation
    per_rank = per_pass // world_size
    starts = (pass_index * per_pass + rank * per_rank for pass_index in range(accumulation))
    return [list(range(start, start + per_rank)) for start in starts]
