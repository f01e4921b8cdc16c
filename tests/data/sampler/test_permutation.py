from __future__ import annotations

import numpy as np
import pytest

from simpletuner.data.sampler.epoch_order import SORTED_SIZE, feistel_permute, hash_key, mix, permuted

DRAWS = 40_000


def numbers(first: int, end: int) -> np.ndarray:
    return np.arange(first, end, dtype=np.uint64)


def surprise(*drawn: np.ndarray, cells: int) -> float:
    """Return how many standard deviations the chi-square of uniform numbers in [0, 1), in `cells` per axis, is off."""
    indices = [np.minimum((values * cells).astype(int), cells - 1) for values in drawn]
    counts = np.bincount(np.ravel_multi_index(indices, (cells,) * len(drawn)), minlength=cells ** len(drawn))
    expected, freedom = len(drawn[0]) / len(counts), len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("size", [*range(1, 20), 64, 65, SORTED_SIZE - 1, SORTED_SIZE, SORTED_SIZE + 1, 10_000, 10_007])
def test_each_part_of_a_row_of_permutations_is_one_and_any_stretch_can_be_computed_alone(size):
    row = permuted(numbers(0, 3 * size), size, hash_key("any", size))
    for part in range(3):
        assert np.array_equal(np.sort(row[part * size : (part + 1) * size]), np.arange(size))
    for first, end in (
        (0, 1),
        (size // 2, size),
        (size - 1, size + 1),
        (size // 3, 3 * size),
        (3 * size - 1, 3 * size),
    ):
        assert np.array_equal(permuted(numbers(first, end), size, hash_key("any", size)), row[first:end])
    if size > 5:
        other = permuted(numbers(0, size), size, hash_key("other", size))
        assert len({tuple(order.tolist()) for order in (other, row[:size], row[size : 2 * size], row[2 * size :])}) == 4


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_few_items_is_equally_likely(size):
    orders = permuted(numbers(0, DRAWS * size), size, hash_key(size)).reshape(DRAWS, size)
    _, counts = np.unique(orders @ (size ** np.arange(size)), return_counts=True)
    possible = int(np.prod(np.arange(1, size + 1)))
    assert len(counts) == possible
    expected, freedom = DRAWS / possible, possible - 1
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5 < 4


@pytest.mark.parametrize("size", [SORTED_SIZE + 1, 10_007, 1_000_003, 100_000_000])
def test_items_and_pairs_of_many_are_uniform_and_independent_over_keys(size):
    """The pairs are neighbours in a row, in a column and on a diagonal of the network's grid, and far from one another.

    With 2 rounds the worst is off by 100,000 standard deviations, with 3 by 50, with 4 by 30.
    """
    keys, columns = mix(numbers(0, DRAWS)), -(-size // (int((size - 1) ** 0.5) + 1))

    def items(position: int) -> np.ndarray:
        return feistel_permute(np.full(DRAWS, position, np.uint64), size, keys) / size

    first = items(0)
    assert abs(surprise(first, cells=50)) < 4 and abs(surprise(items(size - 1), cells=50)) < 4
    for other in (1, columns, columns + 1, size // 2, size - 1):
        assert abs(surprise(first, items(other), cells=20)) < 4
        assert abs(surprise((items(other) - first) % 1.0, cells=50)) < 4, (
            "their distance, which is where neighbours show"
        )


def test_consecutive_items_of_one_permutation_are_unrelated():
    size = 300_000  # numpy's own shuffle is as far off: at most 3.9 over 40 seeds, the network 4.0 over 40 keys
    order = permuted(numbers(0, size), size, hash_key("one")) / size
    for lag in (1, 2, 64, 547, 548, 549):  # 548 x 548 is the network's grid
        assert abs(surprise(order[lag:], order[:-lag], cells=30)) < 4
        assert abs(surprise((order[lag:] - order[:-lag]) % 1.0, cells=1000)) < 4
