"""How long training waits for a checkpoint, and the memory that saving takes: at once, in the background, and by DCP.

One rank holds weights and two moments; ways of saving take turns. Memory is counted in a process of its own for each:
the most anonymous pages (RssAnon) above what it held before. DCP's writer is what wrote sharded checkpoints before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from interleaved import print_table
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from simpletuner.checkpoints.saving import BackgroundSaver, Snapshot, save
from simpletuner.checkpoints.tensors import planned
from simpletuner.parallel.world import World, joined_world

GROUPS, ROUNDS = ("model", "exp_avg", "exp_avg_sq"), 5
STATE = {
    "position": {"epoch": 0, "batch": 1, "batch_size": 4, "consumed": {}},
    "data": "d",
    "optimizer": {"steps": 1, "moments": []},
    "ema_updates": None,
}


class Saving:
    """Each way of saving the same tensors; a method returns when training could go on, and `finish` when it is done."""

    def __init__(self, folder: Path, megabytes: int, world: World) -> None:
        self.folder, self.world, self.step = folder, world, 0
        rows = megabytes // len(GROUPS) // 16
        self.groups = {
            group: {f"block.{number}": torch.randn(1024, 4096) for number in range(rows)} for group in GROUPS
        }
        self.saver = BackgroundSaver(world)
        self.ways: dict[str, Callable[[], object]] = {
            "at once": partial(self.at_once, False),
            "at once, full": partial(self.at_once, True),
            "in the background": self.in_background,
            "by DCP": self.by_dcp,
        }

    def snapshot(self) -> Snapshot:
        self.step += 1
        groups = {name: planned(partial(self.tensors, name)) for name in GROUPS}
        return Snapshot(self.step, groups, STATE, {})

    def tensors(self, group: str) -> dict[str, Tensor]:
        return self.groups[group]

    def at_once(self, full: bool) -> None:
        save(self.folder, self.snapshot(), self.world, full, keep=1)

    def in_background(self) -> None:
        self.saver.start(self.snapshot(), partial(save, self.folder, full=False, keep=1))

    def by_dcp(self) -> None:
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        for group, tensors in self.groups.items():
            writer = HuggingFaceStorageWriter(str(self.folder / "dcp" / group), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer)

    def finish(self) -> None:
        self.saver.wait()


def stalls(folder: Path, megabytes: int) -> dict[str, list[tuple[float, float]]]:
    """Return, for each way and round, the seconds until training goes on and until the checkpoint is complete."""
    with joined_world({}, use_cpu=True) as world:
        saving = Saving(folder, megabytes, world)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in saving.ways}
        for number in range(ROUNDS + 1):
            names = list(saving.ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                os.sync()
                began = time.perf_counter()
                saving.ways[name]()
                stalled = time.perf_counter() - began
                saving.finish()
                found[name].append((stalled, time.perf_counter() - began))
        saving.saver.close()
    return {name: values[1:] for name, values in found.items()}


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def peak(way: str, folder: Path, megabytes: int, answer: Connection) -> None:
    """Send the bytes that one save takes at most, above the tensors themselves."""
    with joined_world({}, use_cpu=True) as world:
        saving, peaks, done = Saving(folder, megabytes, world), [0], threading.Event()
        before = anonymous_bytes()

        def watch() -> None:
            while not done.wait(0.001):
                peaks.append(anonymous_bytes() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        saving.ways[way]()
        saving.finish()
        done.set()
        watcher.join()
        answer.send(max(peaks))
        saving.saver.close()


def peak_in_child(way: str, folder: Path, megabytes: int) -> int:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=peak, args=(way, folder, megabytes, theirs))
    process.start()
    theirs.close()
    process.join()
    with suppress(EOFError):
        return ours.recv()
    sys.exit(f"{way}: exit code {process.exitcode}")


def main() -> None:
    """Measure in a temporary folder of the current one, which is on a disk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=384)
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        seconds = stalls(Path(name), megabytes)
        peaks = {way: peak_in_child(way, Path(name) / "peak", megabytes) for way in seconds}
    whole = {way: statistics.median(total for _, total in values) for way, values in seconds.items()}
    rows = []
    for way, values in seconds.items():
        stalled = statistics.median(stall for stall, _ in values)
        share = stalled / whole["at once"]
        cells = [f"{stalled:.3f}", f"{whole[way]:.3f}", f"{share:.1%}", f"{peaks[way] / 2**20:.0f}"]
        rows.append([way, *cells])
    columns = ["", "training waits (s)", "complete after (s)", "wait / at once", "memory (MiB)"]
    print_table(f"a checkpoint of {megabytes} MiB on one rank (goal: wait / at once <= 5 %)", columns, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
