"""Save a run's state on all ranks, at once or in a thread from copies in host memory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from simpletuner.checkpoints.layout import (
    SET_ASIDE,
    STATE,
    ChooseStep,
    checkpoint_folder,
    file_sizes,
    no_best,
    prune_checkpoints,
)
from simpletuner.checkpoints.tensors import FILE_ERRORS, TensorGroup
from simpletuner.checkpoints.verification import compute_checksums
from simpletuner.checkpoints.writing import write_full, write_sharded
from simpletuner.errors import EnvironmentNotReady, first_line, hint_for
from simpletuner.parallel.host_buffer import HostBuffer
from simpletuner.parallel.world import World
from simpletuner.private_api import of_torch
from simpletuner.system.files.atomic import move_folder, remove, replace_folder, unfinished_path, write_json
from simpletuner.system.files.checksums import with_checksum
from simpletuner.system.files.lease import Lease
from simpletuner.system.files.lease_record import LeaseLost
from simpletuner.system.processes.threads import in_daemon

WEIGHTS_STEM = "diffusion_pytorch_model"


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint: groups of tensors, and the rest as JSON; `config` is the denoiser's.

    A group is made only when it is written, or copied: an engine may have to convert it, and all would not
    fit twice.
    """

    step: int
    groups: Mapping[str, Callable[[], TensorGroup]]
    state: dict[str, Any]
    config: dict[str, Any]
    is_views: bool = False
    """True if all tensors are views of memory that stays as it is until `BackgroundSaver.finish_copying`."""


def save(
    root: Path, snapshot: Snapshot, world: World, full: bool, keep: int, choose_best: ChooseStep = no_best
) -> Path:
    """Collective: write a checkpoint to a hidden folder, rename it once complete, keep the newest and best.

    `full` writes whole tensors as other tools read them, otherwise each rank writes its shards. Raises
    EnvironmentNotReady on all ranks when one of them cannot write; older checkpoints stay as they are.
    """
    folder = checkpoint_folder(root, snapshot.step)
    # The dot in its name: a start after a kill removes it, and never takes it for a checkpoint.
    hidden = unfinished_path(folder, world.lease.record.id)
    # Also a barrier: no rank writes into the folder before it exists and is empty.
    run_on_first_rank(world, hidden, lambda: make_empty_folder(hidden))
    written: dict[str, str] = {}
    for name, make in snapshot.groups.items():
        group = make()
        run_on_all_ranks(world, hidden, partial(write_group, hidden / name, group, world, full, written))
        # Before the next one is made: an engine may have converted it, and two would not fit.
        del group
    run_on_first_rank(world, hidden, lambda: write_json(hidden / "model" / "config.json", snapshot.config))
    # Files have their checksums from writing them; those of rank 0's JSON are computed here.
    sums = compute_checksums(hidden, world, written)

    # Everything else is on the disk by now. state.json, which makes it a checkpoint, comes last, and the
    # rename makes it visible in one step.
    def finish() -> None:
        write_state(hidden, {"step": snapshot.step, **snapshot.state}, sums)
        publish(hidden, folder, world.lease)

    run_on_first_rank(world, hidden, finish)
    if world.is_first:
        prune_checkpoints(root, keep, world.lease.check, choose_best)
    return folder


def publish(hidden: Path, folder: Path, lease: Lease) -> None:
    """Give a folder that was written its name, which another one may have. Raises LeaseLost, and keeps it
    aside, where another run holds the output folder by now."""
    try:
        replace_folder(hidden, folder, lease.check)
    except LeaseLost as error:
        kept = folder.parent / SET_ASIDE / f"{folder.name}-of-{lease.record.id}"
        kept.parent.mkdir(exist_ok=True)
        move_folder(hidden, kept)
        raise LeaseLost(f"{error.message}; what it has written is kept as {kept}", error.hint) from None


def write_group(folder: Path, group: TensorGroup, world: World, full: bool, written: dict[str, str]) -> None:
    """Collective where `full`: write this rank's files, and add their checksums to `written`."""
    sums = write_full(folder, group, world, WEIGHTS_STEM) if full else write_sharded(folder, group, world)
    written |= {f"{folder.name}/{name}": value for name, value in sums.items()}


def run_on_all_ranks(world: World, hidden: Path, action: Callable[[], None]) -> None:
    """Collective: run `action` on every rank. If it fails on one, remove `hidden` and raise the same error on
    all.

    Without that, the other ranks would wait in the next collective for a rank that is gone.
    """
    problem, hint, lost = "", "", None
    try:
        action()
    except FILE_ERRORS as error:
        problem, hint = first_line(error), hint_for(error)
    except LeaseLost as error:
        problem, lost = error.message, error
    # Equal texts of many ranks (a full shared disk) are one sentence.
    problems, hints = (sorted({*world.gather_texts(text)} - {""}) for text in (problem, hint))
    if lost is not None:
        raise lost
    if problems:
        if world.is_first:
            shutil.rmtree(hidden, ignore_errors=True)
        raise EnvironmentNotReady(f"cannot save to {hidden.parent}: {'; '.join(problems)}", "; ".join(hints))


def run_on_first_rank(world: World, hidden: Path, action: Callable[[], None]) -> None:
    """Collective: run `action` on rank 0 while the others wait; errors are raised on all, as above."""
    run_on_all_ranks(world, hidden, action if world.is_first else lambda: None)


def make_empty_folder(folder: Path) -> None:
    remove(folder)
    folder.mkdir(parents=True)


def write_state(hidden: Path, state: Mapping[str, object], sums: Mapping[str, str]) -> None:
    # It makes a folder a checkpoint, so it must be written last.
    # Of the files that ranks have named: the folder may be listed late by a network file system.
    files = file_sizes(hidden, sums)
    write_json(hidden / STATE, with_checksum({**state, "files": files, "checksums": dict(sorted(sums.items()))}))


class HostCopies:
    """Copies of groups of tensors in host memory, which stays allocated for the next ones."""

    def __init__(self) -> None:
        self.buffers: dict[str, HostBuffer] = {}

    def room_for(self, name: str, group: TensorGroup) -> TensorGroup:
        """Return a group like this one, of which memory holds what this rank writes."""
        if name not in self.buffers:
            self.buffers[name] = HostBuffer(group.local, any(tensor.is_cuda for tensor in group.local.values()))
        return replace(group, local=self.buffers[name].views, block=self.buffers[name].block)

    def release(self) -> None:
        for buffer in self.buffers.values():
            buffer.release()
        self.buffers.clear()


def copy_group(group: TensorGroup, copied: TensorGroup) -> None:
    """Fill `copied` with what this rank writes of a group; from a GPU, it is complete once its stream is."""
    if group.local:
        of_torch.foreach_copy_([*copied.local.values()], [*group.local.values()], non_blocking=True)


class CopyInThread:
    """Copies groups in a thread, while the training thread computes gradients of what is copied."""

    def __init__(self, pairs: list[tuple[TensorGroup, TensorGroup]], device: torch.device) -> None:
        """`pairs` are of groups and of those that are to hold their copies."""
        self.pairs, self.is_queued = pairs, threading.Event()
        # A stream of its own, so that the copies run next to the kernels of the next step.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied: Any = None  # an event of torch.cuda, whose stubs disagree about its type
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def run(self) -> None:
        """Return when the copies are complete."""
        try:
            with ExitStack() as entered, torch.no_grad():
                if self.stream is not None:
                    # A thread begins with device 0, on which every rank would make a context of 0.5 GB.
                    entered.enter_context(torch.cuda.device(self.stream.device))
                    entered.enter_context(torch.cuda.stream(self.stream))
                for group, copied in self.pairs:
                    copy_group(group, copied)
                if self.stream is not None:
                    self.copied = torch.cuda.Event(blocking=True)
                    self.copied.record()
        finally:
            self.is_queued.set()
        if self.copied is not None:
            self.copied.synchronize()
        self.pairs.clear()

    def finish(self) -> None:
        """Let the training thread, or its stream, wait for the copies; `run` raises what went wrong."""
        self.is_queued.wait()
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


class BackgroundSaver:
    """Writes one snapshot at a time in a thread, whose collectives use a separate process group."""

    def __init__(self, world: World) -> None:
        """Collective."""
        self.world, self.copies = world.for_thread(), HostCopies()
        self.running: Future[Path] | None = None
        self.copying: CopyInThread | None = None

    def start(self, snapshot: Snapshot, save: Callable[[Snapshot, World], Path]) -> None:
        """Begin to save a copy of a snapshot's tensors. Collective, after `wait` has returned.

        They may change when this has returned, and views once `finish_copying` has.
        """
        copied, pairs = dict[str, TensorGroup](), list[tuple[TensorGroup, TensorGroup]]()
        # One after the other, so that an engine converts one group at a time.
        for name, make in snapshot.groups.items():
            group = make()
            copied[name] = self.copies.room_for(name, group)
            if snapshot.is_views:
                pairs.append((group, copied[name]))
            else:
                copy_group(group, copied[name])
            del group
        if snapshot.is_views:
            self.copying = CopyInThread(pairs, self.world.device)
        elif self.world.device.type == "cuda":
            # The copies above did not wait, and training changes the weights as soon as this returns.
            torch.cuda.synchronize(self.world.device)
        # In the thread a group is only looked up: engines may use the weights again.
        groups = {name: partial(copied.__getitem__, name) for name in copied}
        write = partial(save, replace(snapshot, groups=groups), self.world)
        self.running = in_daemon(partial(copy_and_write, self.copying, write), "saving")

    def finish_copying(self) -> None:
        """Return when views may change: on a GPU by what is queued later."""
        copying, self.copying = self.copying, None
        if copying is not None:
            copying.finish()

    @property
    def has_failed(self) -> bool:
        return self.running is not None and self.running.done() and self.running.exception() is not None

    def wait(self) -> None:
        """Wait until the snapshot is saved. Raises what its thread raised, once."""
        running, self.running = self.running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait without raising: what ended the run is the error to report."""
        if self.running is not None:
            wait([self.running])
        self.copies.release()
        with suppress(dist.DistError, RuntimeError):  # other ranks may be gone
            dist.destroy_process_group(self.world.group)


def copy_and_write(copying: CopyInThread | None, write: Callable[[], Path]) -> Path:
    if copying is not None:
        copying.run()
    return write()
