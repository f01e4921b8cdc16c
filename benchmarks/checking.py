"""What checksums cost: a run that resumes, and cached records that are read, with their checksums compared and without.

Before each turn the files are dropped from the page cache, so that the disk is read, as at the start of a run. Checking
a checkpoint reads every file once more, but in the background, while the run looks at its data and its base model, and
that is the pass that brings it into the page cache. Imports, 5 to 10 s that no check prolongs, are not counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from interleaved import Rounds, print_table, ratio, seconds_in_turns

from simpletuner import worker
from simpletuner.caches.shards import RecordLocation, ShardReader, ShardWriter
from simpletuner.checkpoints import verification
from simpletuner.data.prefetch import THREADS
from simpletuner.errors import Stopped
from simpletuner.models.tiny import sdxl
from simpletuner.settings import load

ROUNDS = 7
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


def large_base(folder: Path) -> None:
    """Write a tiny SDXL whose U-Net has 53 million parameters."""
    sdxl.build(block_out_channels=[160, 320, 320]).save_pretrained(folder)


def resume_seconds(root: Path) -> Rounds:
    """Resume a run, from its settings to the restored state, with and without verifying the checkpoint meanwhile."""
    large_base(root / "base")
    draw = Path(__file__).parent.parent / "examples" / "shapes" / "draw.py"
    subprocess.run([sys.executable, str(draw), str(root / "images"), "--count", "36"], check=True, capture_output=True)
    flags = {
        "model_family": "sdxl",
        "pretrained_model_name_or_path": str(root / "base"),
        "instance_data_dir": str(root / "images"),
        "output_dir": str(root / "run"),
        "resolution": "64",
        "aspect_bucket_alignment": "16",
        "mixed_precision": "no",
        "train_batch_size": "4",
        "max_train_steps": "1",
    }
    worker.run_rank(load(flags))
    loaded = load({**flags, "max_train_steps": "2"})

    def resume() -> None:
        """Go as far as the training loop."""
        with contextlib.suppress(Stopped):
            worker.run_rank(loaded)

    def resume_unverified() -> None:
        """The same, taking every file for undamaged."""
        with unittest.mock.patch.object(verification, "find_file_damage", lambda *_: ""):
            resume()

    def forget_checkpoint(_: str) -> None:
        forget(root / "run" / "checkpoints")

    with unittest.mock.patch.object(worker, "build_trainer", side_effect=Stopped(15, "the state is restored")):
        return seconds_in_turns({"plain": resume_unverified, "checked": resume}, ROUNDS, forget_checkpoint)


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
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        root = Path(name)
        resumed = resume_seconds(root)
        size = sum(path.stat().st_size for path in (root / "run" / "checkpoints").rglob("*") if path.is_file())
        found = {
            f"a run resumes from {size / 2**20:.0f} MiB": resumed,
            f"{RECORDS} records of Flux at random": record_seconds(root / "cache"),
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
