"""How long training waits for a checkpoint, and the memory that saving takes: at once, in the background, and by DCP.

One rank holds weights and two moments; ways of saving take turns. After each save a core multiplies matrices as the
forward and backward pass of a step would, then lets weights change: training waits in the save, and before that change.
The other core, if there is one, copies and writes meanwhile: a step that is slower for it is shown, too. Memory is
counted in a process of its own for each: the most anonymous pages (RssAnon) above what it held before. DCP's writer is
what wrote sharded checkpoints before.
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
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from interleaved import print_table
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from simpletuner.checkpoints.saving import BackgroundSaver, Snapshot, save
from simpletuner.checkpoints.tensors import planned
from simpletuner.parallel.world import World, joined_world

GROUPS, ROUNDS, ROWS = ("model", "exp_avg", "exp_avg_sq"), 9, 256
NO_SAVE = "without a save"
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
            NO_SAVE: lambda: None,
            "at once": partial(self.at_once, False),
            "at once, full": partial(self.at_once, True),
            "in the background": self.in_background,
            "in the background, converted": self.in_background_converted,
            "by DCP": self.by_dcp,
        }

    def snapshot(self, is_views: bool = False) -> Snapshot:
        self.step += 1
        groups = {name: planned(partial(self.tensors, name)) for name in GROUPS}
        return Snapshot(self.step, groups, STATE, {}, is_views)

    def tensors(self, group: str) -> dict[str, Tensor]:
        return self.groups[group]

    def at_once(self, full: bool) -> None:
        save(self.folder, self.snapshot(), self.world, full, keep=1)

    def in_background(self) -> None:
        self.saver.start(self.snapshot(is_views=True), partial(save, self.folder, full=False, keep=1))

    def in_background_converted(self) -> None:
        """As of an engine that has to convert what it saves: copies are complete before training goes on."""
        self.saver.start(self.snapshot(), partial(save, self.folder, full=False, keep=1))

    def by_dcp(self) -> None:
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        for group, tensors in self.groups.items():
            writer = HuggingFaceStorageWriter(str(self.folder / "dcp" / group), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer)

    def compute_gradients(self) -> None:
        """Multiply by each weight as often as a forward and a backward pass of `ROWS` rows."""
        rows = torch.ones(ROWS, 4096)
        for weight in self.groups["model"].values():
            for _ in range(3):
                torch.mm(rows, weight.T)

    def finish(self) -> None:
        self.saver.wait()


class Seconds(NamedTuple):
    """Seconds of one save, and of the step after it."""

    waiting: float
    until_update: float
    """From the save until weights may change, gradients of the next step included."""
    in_all: float


def stalls(folder: Path, megabytes: int) -> dict[str, list[Seconds]]:
    """Return the seconds of each way and round."""
    with joined_world({}, use_cpu=True) as world:
        saving = Saving(folder, megabytes, world)
        found: dict[str, list[Seconds]] = {name: [] for name in saving.ways}
        for number in range(ROUNDS + 1):
            names = list(saving.ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                os.sync()
                began = time.perf_counter()
                saving.ways[name]()
                saved = time.perf_counter()
                saving.compute_gradients()
                computed = time.perf_counter()
                saving.saver.finish_copying()
                ready = time.perf_counter()
                saving.finish()
                waiting = saved - began + ready - computed
                found[name].append(Seconds(waiting, ready - began, time.perf_counter() - began))
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
        peaks = {way: peak_in_child(way, Path(name) / "peak", megabytes) for way in seconds if way != NO_SAVE}
    step = statistics.median(each.until_update for each in seconds.pop(NO_SAVE))
    at_once = statistics.median(each.waiting for each in seconds["at once"])
    rows = []
    for way, values in seconds.items():
        waiting, until_update, in_all = map(statistics.median, zip(*values, strict=True))
        share, slower = waiting / at_once, until_update - step - waiting
        cells = [f"{waiting:.3f}", f"{share:.1%}", f"{slower:.3f}", f"{in_all:.3f}", f"{peaks[way] / 2**20:.0f}"]
        rows.append([way, *cells])
    columns = ["", "training waits (s)", "wait / at once", "step slower by (s)", "complete after (s)", "memory (MiB)"]
    title = f"a checkpoint of {megabytes} MiB on one rank, gradients of {step:.2f} s (goal: wait / at once <= 5 %)"
    print_table(title, columns, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
