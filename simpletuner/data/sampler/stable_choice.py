"""Choices fixed for each image by a hash of its name, so that images which come or go change few of them."""

# pyarrow comes without types.
# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from simpletuner.data.sampler.epoch_order import hash_key


def hash_names(names: pa.ChunkedArray, *key: object) -> np.ndarray:
    # 0.25 s per million.
    hashed = partial(xxhash.xxh3_64_intdigest, seed=hash_key(*key))
    chunks = (chunk.cast(pa.large_binary()).to_pylist() for chunk in names.chunks)
    return np.fromiter((value for chunk in chunks for value in map(hashed, chunk)), np.uint64, len(names))


def choose_by_name(names: pa.ChunkedArray, mask: np.ndarray, count: int, *key: object) -> np.ndarray:
    """Mask of the `count` names with the smallest hashes, among those with a true `mask`."""
    places = np.flatnonzero(mask)
    if len(places) <= count:
        return mask
    hashes = hash_names(names.take(pa.array(places)), *key)
    chosen = np.zeros(len(mask), bool)
    chosen[places[np.argpartition(hashes, count)[:count]]] = True
    return chosen


def hash_texts(digest: xxhash.xxh3_128, column: pa.ChunkedArray) -> None:
    """Hash the texts of a column without nulls, independent of its chunks."""
    # Lengths, too: without them "ab", "c" and "a", "bc" would have one digest.
    lengths = pc.binary_length(column)
    for chunk in lengths.chunks:
        digest.update(chunk.to_numpy())
    for chunk in column.chunks:
        # Copied by itself, a chunk that is a slice has buffers that begin with it.
        _, offsets, content = pa.concat_arrays([chunk]).buffers()
        if content is not None:
            digest.update(memoryview(content)[: int(np.frombuffer(offsets, np.int64)[len(chunk)])])
