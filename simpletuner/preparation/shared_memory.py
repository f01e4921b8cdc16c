"""Arrays of the plan in memory that the ranks of a machine share."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from simpletuner.data.samples.samples import Samples
from simpletuner.parallel.world import World
from simpletuner.preparation.plan import Plan

# A multiple of the size of every dtype: numpy goes through copies where elements are not aligned.
ALIGNMENT_BYTES = 64
# Less is not worth a file.
LEAST_BYTES = 1 << 20


def share_memory(plan: Plan, place: str, world: World, stop: Callable[[], None]) -> Plan:
    """The plan with arrays that the ranks of a machine share; `place` is unique in a run. Collective."""
    own = [array for part in plan.samples.parts for array in part.arrays]
    own += [array for bucket in plan.buckets.values() for array in bucket.groups.values()]
    shared = iter(share_arrays(own, place, world, stop))
    samples = Samples([part.with_arrays(*islice(shared, len(part.arrays))) for part in plan.samples.parts])
    for bucket in plan.buckets.values():  # in place: the sampler and its schedule hold these buckets, too
        bucket.groups.update({copies: next(shared) for copies in bucket.groups})
    return replace(plan, samples=samples)


def share_arrays(arrays: Sequence[np.ndarray], place: str, world: World, stop: Callable[[], None]) -> list[np.ndarray]:
    """Return arrays equal to `arrays` in memory that the ranks of a machine share. Collective.

    `place` is unique in a run. If no file can be made, or its content differs, a rank keeps its own.
    """
    if sum(each.nbytes for each in arrays) < LEAST_BYTES:
        return list(arrays)
    key = f"{place}/{world.machine}"
    path = write(arrays) if world.local_rank == 0 else None
    if world.local_rank == 0:
        world.store.set(key, str(path or ""))
    world.store_barrier(f"{place}/written", stop)
    shared = read(Path(world.store.get(key).decode()), arrays)
    world.store_barrier(f"{place}/mapped", stop)
    if path is not None:
        path.unlink(missing_ok=True)  # the memory stays until the last rank ends
    return shared


def checksum(arrays: Sequence[np.ndarray]) -> str:
    digest = xxhash.xxh3_128()
    for each in arrays:
        digest.update(np.ascontiguousarray(each).data)
    return digest.hexdigest()


def starts_of(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return the offset of each array in a file, and the file's size, in bytes."""
    starts, end = [], 0
    for each in arrays:
        starts.append(end)
        end += -(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return starts, end


def write(arrays: Sequence[np.ndarray]) -> Path | None:
    """Write arrays into a temporary file of this machine; None where there is no room."""
    starts, size = starts_of(arrays)
    path = None
    try:
        number, name = tempfile.mkstemp(prefix="simpletuner-arrays-")
        path = Path(name)
        with os.fdopen(number, "wb") as file:
            for start, each in zip(starts, arrays, strict=True):
                file.seek(start)
                file.write(np.ascontiguousarray(each).data)
            file.truncate(size)
    except OSError:
        if path is not None:
            path.unlink(missing_ok=True)
        return None
    return path


def read(path: Path, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Map the arrays of a file; return `arrays` where there is none, or one with other content."""
    starts, size = starts_of(arrays)
    with suppress(OSError, ValueError):  # no such file on this machine, or an empty one
        with path.open("rb") as file:
            # Read-only: a rank that wrote here would change the other ranks' samples; it gets an exception.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(content) == size:
            shared = [
                np.frombuffer(content, each.dtype, each.size, start).reshape(each.shape)
                for start, each in zip(starts, arrays, strict=True)
            ]
            if checksum(shared) == checksum(arrays):
                return shared
    return list(arrays)
