"""Keyed permutations of [0, size): the position of any item is computed alone, whatever the size."""

from __future__ import annotations

import hashlib
import math

import numpy as np

ROUNDS = 8
"""Rounds of the Feistel network; even. 7 are enough to be indistinguishable from a random permutation by nearly as many
positions as there are (Patarin 2003, "Luby-Rackoff: 7 rounds are enough"). With ideal hashes, the places of two items
among more than 4,096 are then within 3e-13 of uniform (total variation), computed exactly; tests see it up to 4."""

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
        return permuted_by_network(positions, size, mix(parts + np.uint64(key)))
    first, last = int(parts[0]), int(parts[-1])
    keys = mix(np.arange(first, last + 1, dtype=np.uint64) + np.uint64(key))
    orders = np.argsort(mix(keys[:, None] + np.arange(size, dtype=np.uint64)), axis=1)
    return orders.ravel()[int(positions[0]) :][: len(numbers)]


def permuted_by_network(positions: np.ndarray, size: int, keys: Keys) -> np.ndarray:
    """Return where a permutation takes each position: a Feistel network over a grid of at least `size` cells.

    Results beyond `size` go through it again until they are in range (cycle walking), so that it stays a permutation.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    items = shift_in_turns(positions, rows, columns, keys)
    # The grid has fewer than `rows` spare cells: above 4,096 items less than 1.6 % go through it again.
    while len(beyond := np.flatnonzero(items >= size)):
        items[beyond] = shift_in_turns(items[beyond], rows, columns, keys[beyond])
    return items


def shift_in_turns(cells: np.ndarray, rows: int, columns: int, keys: Keys) -> np.ndarray:
    """Shift one coordinate of each cell, cyclically, by a hash of the other one; then the other one, and so on."""
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
