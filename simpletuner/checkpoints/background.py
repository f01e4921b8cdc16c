"""Save checkpoints in a thread, from copies in host memory, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from simpletuner.checkpoints.saving import Snapshot
from simpletuner.checkpoints.shards import TensorGroup
from simpletuner.parallel.devices.host_buffer import HostBuffer
from simpletuner.parallel.world import World
from simpletuner.system.processes.threads import in_daemon


class HostCopies:
    """Copies of groups of tensors in host memory, which stays allocated for the next ones."""

    def __init__(self) -> None:
        self.buffers: dict[str, HostBuffer] = {}

    def copy(self, name: str, group: TensorGroup) -> TensorGroup:
        """Copy what this rank writes of a group. A copy from a GPU is complete once its stream is."""
        if name not in self.buffers:
            self.buffers[name] = HostBuffer(group.local, any(tensor.is_cuda for tensor in group.local.values()))
        copies = self.buffers[name].views
        for key, tensor in group.local.items():
            copies[key].copy_(tensor, non_blocking=True)
        return replace(group, local=copies)

    def release(self) -> None:
        for buffer in self.buffers.values():
            buffer.release()
        self.buffers.clear()


class BackgroundSaver:
    """Writes one snapshot at a time in a thread, whose collectives use a separate process group."""

    def __init__(self, world: World) -> None:
        """Collective."""
        self.world, self.copies = world.for_thread(), HostCopies()
        self.running: Future[Path] | None = None

    def start(self, snapshot: Snapshot, save: Callable[[Snapshot, World], Path]) -> None:
        """Copy what a snapshot holds, and begin to save the copy. Collective. `wait` must have returned before."""
        # One after the other, so that an engine converts one group at a time.
        copied = {name: self.copies.copy(name, make()) for name, make in snapshot.groups.items()}
        if self.world.device.type == "cuda":
            # The copies above did not wait, and training changes the weights as soon as this returns.
            torch.cuda.synchronize(self.world.device)
        # In the thread a group is only looked up: engines may use the weights again as soon as this returns.
        groups = {name: partial(copied.__getitem__, name) for name in copied}
        self.running = in_daemon(partial(save, replace(snapshot, groups=groups), self.world), "saving")

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
