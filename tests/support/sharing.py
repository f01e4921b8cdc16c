"""Ranks that share arrays, for `tests/preparation/test_shared_arrays.py`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation.shared_memory import share_arrays


def share_in(folder: str, report: str) -> None:
    """Share arrays in several circumstances; write what each rank sees, by circumstance. `folder` is for its files."""
    tempfile.tempdir = folder
    with joined_world() as world:
        arrays = [np.arange(400_000, dtype=np.int32), np.zeros(0, np.int64), np.full((3, 5), 7, np.uint32)]
        other = [arrays[0] + world.rank, *arrays[1:]]
        apart = replace(world, machine=world.rank, local_rank=0)
        seen = {"equal": seen_by(world, "a", arrays), "other": seen_by(world, "b", other)}
        seen["apart"] = seen_by(apart, "c", arrays)
        seen["small"] = seen_by(world, "d", [arrays[2]])
        world.barrier()  # each first rank of a machine removes its file
        seen["left"] = [path.name for path in Path(folder).iterdir()]
        texts = world.gather_texts(json.dumps(seen))
        if world.is_first:
            Path(report).write_text(json.dumps([json.loads(text) for text in texts]))


def seen_by(world: World, place: str, arrays: list[np.ndarray]) -> str:
    """Return the file in which the shared arrays lie: its inode, `own` for memory of this process."""
    shared = share_arrays(arrays, place, world, lambda: None)
    assert all(np.array_equal(one, two) and one.dtype == two.dtype for one, two in zip(shared, arrays, strict=True))
    address = shared[0].__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= address < end and "simpletuner-arrays" in line:
            assert not shared[0].flags.writeable
            return line.split()[4]
    return "own"
