"""Find images that a dataset holds more than once: the same bytes, or nearly the same pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from simpletuner.tools.dataset.contents import Content

# By how many bits of dHash two images may differ, of which one of four parts of 16 bits must be the same: so
# all pairs that differ by 3 are looked at, and most of the others.
MAX_BITS = 8


PARTS = 4


# Mean difference of their colours, of 255; another size and JPEG of quality 30 make up to 2.
MAX_DIFFERENCE = 4.0


# Of their contrast: two photographs of gravel have the same mean colours, and differ by about their contrast.
MAX_SHARE = 0.25


# With how many of those that follow in the order of hashes an image is compared: plain images all have one
# hash.
MAX_COMPARED = 64


# Pairs whose colours are compared at once: of 100,000 plain images all of one hash they would take 400 MB.
BLOCK = 1024


# Of float32 means of bytes.
ROUNDING = 1e-3


Groups = list[list[int]]


def exact_duplicates(images: Mapping[int, Content]) -> Groups:
    groups: dict[bytes, list[int]] = {}
    for index in sorted(images):
        groups.setdefault(images[index].checksum, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def near_duplicates(images: Mapping[int, Content]) -> Groups:
    """Groups of images that look the same; of those with the same bytes, only the first counts."""
    again = {index for group in exact_duplicates(images) for index in group[1:]}
    indices = np.array(sorted(images.keys() - again), np.int64)
    if len(indices) < 2:
        return []
    found = [images[index] for index in indices.tolist()]
    pairs = (pair for first, second in close_pairs(found) for pair in zip(first, second, strict=True))
    return [indices[group].tolist() for group in joined(pairs)]


def close_pairs(images: Sequence[Content]) -> Iterator[tuple[list[int], list[int]]]:
    hashes = np.array([each.gradients for each in images], np.uint64)
    colours = np.stack([each.colours for each in images])
    quarters = quarter_means(colours)
    brightness = quarters.mean(axis=1)
    most = np.minimum(MAX_DIFFERENCE, MAX_SHARE * np.array([each.contrast for each in images]))
    for part in range(PARTS):
        shift = np.uint64(64 // PARTS * part)
        # Sorted by that part of the hash first: images of equal parts are neighbours.
        turned = (hashes << shift) | (hashes >> (np.uint64(64) - shift) if part else np.uint64(0))
        # By brightness where hashes are equal, as of plain images: only MAX_COMPARED neighbours are compared.
        order = np.lexsort((brightness, turned))
        parts, left = turned[order] >> np.uint64(64 - 64 // PARTS), np.arange(len(images))
        for distance in range(1, MAX_COMPARED):
            left = left[left + distance < len(images)]
            left = left[parts[left] == parts[left + distance]]
            first, second = order[left], order[left + distance]
            alike = np.bitwise_count(hashes[first] ^ hashes[second]) <= MAX_BITS
            # Means differ by no more than what they are means of, so no pair is lost.
            alike &= np.abs(quarters[first] - quarters[second]).mean(axis=1) <= most[first] + ROUNDING
            first, second = first[alike], second[alike]
            for start in range(0, len(first), BLOCK):
                one, other = first[start : start + BLOCK], second[start : start + BLOCK]
                difference = np.abs(colours[one].astype(np.int16) - colours[other]).mean(axis=(1, 2, 3))
                close = difference <= most[one]
                yield one[close].tolist(), other[close].tolist()


def quarter_means(colours: np.ndarray) -> np.ndarray:
    """Return the mean of each channel in each quarter, shape (images, 12)."""
    count, height, width, channels = colours.shape
    quarters = colours.reshape(count, 2, height // 2, 2, width // 2, channels)
    return quarters.mean(axis=(2, 4), dtype=np.float32).reshape(count, -1)


def joined(pairs: Iterable[tuple[int, int]]) -> Groups:
    """Return the groups that pairs make: an image belongs to the group of each that it is in a pair with."""
    parent: dict[int, int] = {}

    def root(index: int) -> int:
        while parent.setdefault(index, index) != index:
            # Path halving keeps the trees flat, however long a chain of similar images is.
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for first, second in pairs:
        low, high = sorted((root(first), root(second)))
        parent[high] = low
    groups: dict[int, list[int]] = {}
    for index in sorted(parent):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())
