"""Order of one bucket in one epoch, computed block by block: an epoch costs nothing to begin, and any
position is reached at once.

- Keyed permutations of [0, size): the position of any item is computed alone, for any size.
- Randomness of a sample in a step, a function of (seed, sample, step, occurrence) only: ranks, threads and
  batch sizes cannot change it, and a resumed run repeats it bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# Rounds of the Feistel network; even. 7 are enough to be indistinguishable from a random permutation by
# nearly as many positions as there are (Patarin 2003, "Luby-Rackoff: 7 rounds are enough"). With ideal
# hashes, the places of two items among more than 4,096 are then within 3e-13 of uniform (total variation),
# computed exactly; tests see it up to 4.
ROUNDS = 8

# Up to this size, hashes are sorted instead: that is exactly uniform, where the orders of 6 items in a
# network of 12 rounds are 2 % off, and no more work, since blocks of the order are as long.
SORTED_SIZE = 4096

Keys = np.ndarray
"""uint64, one per position. Positions with one key belong to one permutation."""


def hash_key(*parts: object) -> int:
    """Return 64 bits that depend on all `parts`."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest())


def mix(values: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64, elementwise (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permuted(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the items at consecutive `numbers` (uint64) of an endless row of permutations of [0, size)."""
    parts, positions = np.divmod(numbers, np.uint64(size))
    if size > SORTED_SIZE:
        return feistel_permute(positions, size, mix(parts + np.uint64(key)))
    first, last = int(parts[0]), int(parts[-1])
    keys = mix(np.arange(first, last + 1, dtype=np.uint64) + np.uint64(key))
    orders = np.argsort(mix(keys[:, None] + np.arange(size, dtype=np.uint64)), axis=1)
    return orders.ravel()[int(positions[0]) :][: len(numbers)]


def feistel_permute(positions: np.ndarray, size: int, keys: Keys) -> np.ndarray:
    """Permute positions by a Feistel network over a grid of at least `size` cells.

    Results beyond `size` go through it again until they are in range (cycle walking), so that it stays a
    permutation.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    items = feistel_rounds(positions, rows, columns, keys)
    # The grid has fewer than `rows` spare cells: above 4,096 items less than 1.6 % go through it again.
    while len(beyond := np.flatnonzero(items >= size)):
        items[beyond] = feistel_rounds(items[beyond], rows, columns, keys[beyond])
    return items


def feistel_rounds(cells: np.ndarray, rows: int, columns: int, keys: Keys) -> np.ndarray:
    """Shift one coordinate of each cell, cyclically, by a hash of the other, then vice versa, and so on."""
    coordinates, lengths = list(np.divmod(cells, np.uint64(columns))), (np.uint64(rows), np.uint64(columns))
    for number in range(ROUNDS):
        moved, length = number % 2, lengths[number % 2]
        # Coordinates are below 2**32, so the round's number has the upper bits for itself: no two rounds hash
        # the same input, as a Feistel network needs functions that are independent.
        hashed = mix(keys + np.uint64(number << 32) + coordinates[1 - moved]) >> np.uint64(32)
        # Multiplying 32 bits of a hash by the length maps them to [0, length), without a division.
        shifted = coordinates[moved] + (hashed * length >> np.uint64(32))
        coordinates[moved] = shifted - length * (shifted >= length)
    return coordinates[0] * lengths[1] + coordinates[1]


# Items of a block. Longer ones cost hardly less per item, and a step at a block's start waits for it.
BLOCK = 4096


@dataclass(frozen=True)
class Bucket:
    """Samples of one shape by number of copies in an epoch: copies -> ascending sample indices.

    `passes` is how often the whole bucket is repeated to fill a batch. Its length is the items of an epoch;
    with fractional copies, some epochs have one more item of such a group.
    """

    groups: dict[int | Fraction, np.ndarray]
    passes: int = 1

    def __len__(self) -> int:
        return self.items_until(1)

    def items_until(self, epoch: int) -> int:
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
        # Fractional copies share one row over all epochs, so each epoch shows what the last one left out.
        if isinstance(copies, int):
            return cls(samples, 0, copies * len(samples), hash_key(seed, name, epoch, copies))
        # Cut at floor(epoch * copies * samples): the parts of all epochs join without a gap.
        first, end = (each * copies * len(samples) // 1 for each in (epoch, epoch + 1))
        return cls(samples, first, end - first, hash_key(seed, name, copies))


class EpochOrder:
    """The items of a bucket in one epoch.

    Samples with the same number of copies m are a group: m permutations, one after the other. Groups are
    merged evenly: each block holds an equal share of every group, and within a block the items of each are
    evenly spaced in time, up to a random part of their distance.
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
    """Rest of one bucket in one epoch: samples that wait, then the items of `order` after `consumed` ones."""

    def __init__(self, order: EpochOrder, consumed: int, waiting: Sequence[int]) -> None:
        self.order, self.consumed, self.waiting = order, consumed, deque(waiting)
        self.block_start, self.block = consumed, np.empty(0, np.uint32)

    def __len__(self) -> int:
        return len(self.waiting) + self.order.length - self.consumed

    def take(self, size: int) -> list[int]:
        batch: dict[int, None] = {}  # a set that keeps insertion order
        duplicates: deque[int] = deque()
        # Looking further than `size` duplicates ahead would read an epoch to fill a small bucket's batch.
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


# pyarrow comes without types.


@dataclass(frozen=True)
class SampleNoise:
    """The random numbers of a sample: float32 noise of the latents' shape, and three uniform numbers in [0,
    1).

    `u` becomes the timestep, `caption` chooses one of several captions, `dropout` is compared with the
    dropout rate.
    """

    noise: np.ndarray
    u: float
    caption: float
    dropout: float


def sample_noise(seed: int, sample_id: str, step: int, occurrence: int, shape: tuple[int, ...]) -> SampleNoise:
    """Return a sample's random numbers. `occurrence` counts its copies in the same global batch: without
    it in the key, the copies of an oversubscribed bucket would be trained with the same noise, which
    teaches nothing new."""
    # 16 bytes: Philox takes a key of 128 bits as it is, without a seed sequence to hash.
    digest = hashlib.blake2b(f"{seed}/{sample_id}/{step}/{occurrence}".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))
    u, caption, dropout = random.random(3)
    return SampleNoise(random.standard_normal(shape, dtype=np.float32), float(u), float(caption), float(dropout))
