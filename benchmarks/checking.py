"""What checksums cost: a checkpoint and cached records read from the disk, with their checksums compared and without.

Before each turn the files are dropped from the page cache, so that the disk is read, as at the start of a run. Checking
a checkpoint reads every file once more, but that is the pass that brings it into the page cache.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch
from interleaved import Rounds, print_table, ratio, seconds_in_turns

from simpletuner.caches.shards import RecordLocation, ShardReader, ShardWriter
from simpletuner.checkpoints.layout import Checkpoint, checkpoint_folder
from simpletuner.checkpoints.saving import write_state
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.checkpoints.verification import compute_checksums, find_damage
from simpletuner.data.prefetch import THREADS
from simpletuner.parallel.world import World, joined_world

ROUNDS, TENSORS, ELEMENTS = 7, 16, 4_000_000
RECORDS, RECORD = 200, {"latents": torch.randn(16, 128, 128), "text": torch.randn(512, 4096).bfloat16()}
PARTS = {"file": "1-1", "VAE": "0123456789abcdef"}


def forget(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def checkpoint_seconds(root: Path, world: World) -> Rounds:
    """Read a checkpoint's weights, with and without checking it before."""
    folder = checkpoint_folder(root, 1)
    (folder / "model").mkdir(parents=True)
    weights = {f"layer{number}.weight": torch.randn(ELEMENTS) for number in range(TENSORS)}
    safetensors.torch.save_file(weights, folder / "model" / "a.safetensors")
    position = {"epoch": 0, "batch": 1, "batch_size": 4, "consumed": {}}
    state = {"step": 1, "position": position, "data": "d", "optimizer": {"steps": 1, "moments": []}}
    write_state(folder, {**state, "ema_updates": None}, compute_checksums(folder, world))
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def read() -> None:
        """Read the weights."""
        read_tensors(Checkpoint(folder, state).files("model"), target, "the checkpoint")

    def check_and_read() -> None:
        """Compare all checksums, then read the weights."""
        assert find_damage(folder, world) == ""
        read()

    return seconds_in_turns({"plain": read, "checked": check_and_read}, ROUNDS, lambda _: forget(folder))


def record_seconds(folder: Path) -> Rounds:
    """Read cached records at random until every page is touched, with and without comparing checksums."""
    with ShardWriter(folder, 0) as writer:
        for number in range(RECORDS):
            writer.write(str(number), PARTS, RECORD)

    def read(prepare: Callable[[RecordLocation], RecordLocation]) -> None:
        """Read all records in random order, in as many threads as a run reads them with."""
        reader = ShardReader(folder)
        locations = [prepare(location) for location in reader.locations.values()]

        def touch(location: RecordLocation) -> None:
            for tensor in reader.read(location).values():
                tensor.view(-1).clone()

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(touch, random.Random(0).sample(locations, len(locations))))

    contestants = {
        "plain": lambda: read(lambda location: replace(location, checksum="")),
        "checked": lambda: read(lambda location: location),
    }
    return seconds_in_turns(contestants, ROUNDS, lambda _: forget(folder))


def main() -> None:
    """Measure both in a temporary folder of the current one, which is on a disk."""
    torch.set_num_threads(1)  # with more, copies of torch in several threads wait for one another
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, joined_world() as world:
        found = {
            f"checkpoint, {TENSORS * ELEMENTS * 4 / 2**20:.0f} MiB": checkpoint_seconds(Path(name), world),
            f"{RECORDS} records of Flux at random": record_seconds(Path(name) / "cache"),
        }
    rows = [
        [
            title,
            *(f"{statistics.median(seconds[each]):.3f}" for each in ("plain", "checked")),
            f"{ratio(seconds, 'checked', 'plain'):.3f}",
        ]
        for title, seconds in found.items()
    ]
    print_table("seconds to read from the disk (goal: ratio <= 1.05)", ["", "plain", "checked", "ratio"], rows)


if __name__ == "__main__":
    main()
