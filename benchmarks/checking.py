"""What checksums cost: a run that resumes, and cached records that are read, with their checksums compared and without.

Before each turn the files are dropped from the page cache, so that the disk is read, as at the start of a run. A run
reads its checkpoint ahead while it imports torch, verifies it while it looks at its data and its base model, and then
loads it, both from the page cache.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from interleaved import Rounds, print_table, ratio, seconds_in_turns

from simpletuner.caches.store.records import RecordLocation
from simpletuner.caches.store.shards import ShardReader, ShardWriter
from simpletuner.data.prefetch import THREADS
from simpletuner.models.catalog.registry import load_preset
from simpletuner.models.tiny.build import build_preset

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
    preset = load_preset("sdxl")
    assert preset is not None and preset.tiny is not None
    build_preset(preset.tiny, unet={"block_out_channels": [160, 320, 320]}).save_pretrained(folder)


def resume_seconds(root: Path) -> Rounds:
    """Resume a run, from the command to its restored state, from a checkpoint with checksums and from one without."""
    large_base(root / "base")
    draw = Path(__file__).parent.parent / "examples" / "shapes" / "draw.py"
    subprocess.run([sys.executable, str(draw), str(root / "images"), "--count", "36"], check=True, capture_output=True)
    flags = [
        "--model_family=sdxl",
        f"--pretrained_model_name_or_path={root / 'base'}",
        f"--instance_data_dir={root / 'images'}",
        f"--output_dir={root / 'run'}",
        "--resolution=64",
        "--aspect_bucket_alignment=16",
        "--mixed_precision=no",
        "--train_batch_size=4",
    ]
    command = [sys.executable, "-m", "simpletuner", "train", *flags]
    subprocess.run([*command, "--max_train_steps=1"], check=True, capture_output=True)
    state_file = root / "run" / "checkpoints" / "checkpoint-000001" / "state.json"
    state = json.loads(state_file.read_text())

    def prepare(name: str) -> None:
        # Version 0.1 wrote no checksums, neither of files nor of the state.
        left_out = () if name == "checked" else ("checksums", "checksum")
        state_file.write_text(json.dumps({key: value for key, value in state.items() if key not in left_out}))
        forget(root / "run" / "checkpoints")

    def resume() -> None:
        """Wait for the table that a run prints when its state is restored."""
        with subprocess.Popen([*command, "--max_train_steps=2"], stderr=subprocess.PIPE, text=True) as run:
            assert run.stderr is not None
            if not any("1 to 2" in line for line in run.stderr):
                raise SystemExit("the run ended before its state was restored")
            run.kill()

    return seconds_in_turns({"plain": resume, "checked": resume}, ROUNDS, prepare)


def record_seconds(folder: Path) -> Rounds:
    """Read cached records at random until every page is touched, with and without comparing checksums."""
    with ShardWriter(folder, 0) as writer:
        for number in range(RECORDS):
            writer.write(str(number), PARTS, RECORD)

    def read(prepare: Callable[[RecordLocation], RecordLocation]) -> None:
        """Read all records in random order, in as many threads as a run reads them with."""
        reader = ShardReader(folder)
        locations = [prepare(location) for location in reader.records()]

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
