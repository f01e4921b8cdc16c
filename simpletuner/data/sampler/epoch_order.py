"""The order of one bucket in one epoch, computed block by block: an epoch costs nothing to begin, and any position
is reached at once."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from simpletuner.data.sampler.permutation import hash_key, mix, permuted

BLOCK = 4096
"""Items of a block. Longer ones cost hardly less per item, and a step at a block's start waits for it."""


@dataclass(frozen=True)
class Bucket:
    """Samples of one shape by number of copies in an epoch: copies -> ascending sample indices.

    `passes` is how often the whole bucket is repeated to fill a batch. Its length is the items of an epoch; with
    fractional copies, some epochs have one more item of such a group.
    """

    groups: dict[int | Fraction, np.ndarray]
    passes: int = 1

    def __len__(self) -> int:
        return self.items_until(1)

    def items_until(self, epoch: int) -> int:
        """Return how many items the epochs before `epoch` have together."""
        copies_of_all = ((self.passes * copies, len(samples)) for copies, samples in self.groups.items())
        return sum(epoch * copies * count // 1 for copies, count in copies_of_all)

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.groups.values()))


@dataclass(frozen=True)
class GroupOrder:
    """A group in one epoch: `length` items, from number `first` on, of an endless row of permutations."""

    samples: np.ndarray
    first: int
    length: int
    key: int

    @classmethod
    def of(cls, copies: int | Fraction, samples: np.ndarray, seed: int, name: str, epoch: int) -> GroupOrder:
        """With fractional copies, all epochs share one row, so that each shows what the last one left out."""
        if isinstance(copies, int):
            return cls(samples, 0, copies * len(samples), hash_key(seed, name, epoch, copies))
        # Cut at floor(epoch * copies * samples): the parts of all epochs join without a gap, whatever the
        # fraction.
        first, end = (each * copies * len(samples) // 1 for each in (epoch, epoch + 1))
        return cls(samples, first, end - first, hash_key(seed, name, copies))


class EpochOrder:
    """The items of a bucket in one epoch.

    Samples with the same number of copies m are a group: m permutations, one after the other. Groups are merged
    evenly: each block holds an equal share of every group, and within a block the items of each are evenly spaced in
    time, up to a random part of their distance.
    """

    def __init__(self, bucket: Bucket, seed: int, name: str, epoch: int) -> None:
        self.groups = [
            GroupOrder.of(bucket.passes * copies, samples, seed, name, epoch)
            for copies, samples in bucket.groups.items()
        ]
        self.length = sum(group.length for group in self.groups)
        self.blocks = -(-self.length // BLOCK)

    def block_at(self, position: int) -> tuple[int, np.ndarray]:
        """Return the position at which the block around `position` begins, and the sample indices in it."""
        # Blocks differ in length by rounding, so the block of a position is searched, not divided out.
        number = bisect_right(range(self.blocks), position, key=self._start) - 1
        groups = [self._group_in_block(group, number) for group in self.groups]
        items, times = (np.concatenate(arrays) for arrays in zip(*groups, strict=True))
        return self._start(number), items[np.argsort(times, kind="stable")]

    def _start(self, number: int) -> int:
        return sum(number * group.length // self.blocks for group in self.groups)

    def _group_in_block(self, group: GroupOrder, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a group's items in a block, with their times in [0, 1]."""
        # Every group is cut at the same fractions of its length, so each block has its share of every group
        # to within one item, and its bounds follow from its number alone.
        samples, first, end = group.samples, *(each * group.length // self.blocks for each in (number, number + 1))
        if first == end:
            return samples[:0], np.zeros(0)
        numbers = np.arange(group.first + first, group.first + end, dtype=np.uint64)
        # A second key: with the permutation's own, an item's time within the block would depend on which
        # sample it is.
        jitter = mix(numbers ^ np.uint64(hash_key(group.key, "times"))) / 2.0**64
        return samples[permuted(numbers, len(samples), group.key)], (np.arange(end - first) + jitter) / (end - first)


class EpochStream:
    """The rest of one bucket in one epoch: samples that wait, then the items of `order` after `consumed` ones."""

    def __init__(self, order: EpochOrder, consumed: int, waiting: Sequence[int]) -> None:
        self.order, self.consumed, self.waiting = order, consumed, deque(waiting)
        self.block_start, self.block = consumed, np.empty(0, np.uint32)

    def __len__(self) -> int:
        return len(self.waiting) + self.order.length - self.consumed

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
        return [self._pop() for _ in range(len(self))]

    def _pop(self) -> int:
        if self.waiting:
            return self.waiting.popleft()
        if self.consumed == self.block_start + len(self.block):
            self.block_start, self.block = self.order.block_at(self.consumed)
        self.consumed += 1
        return self.block.item(self.consumed - 1 - self.block_start)
