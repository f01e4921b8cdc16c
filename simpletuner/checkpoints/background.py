"""Save checkpoints in a thread, from copies in host memory, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simpletuner.checkpoints.saving import Snapshot
from simpletuner.checkpoints.shards import TensorGroup
from simpletuner.parallel.world import World

ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes of a buffer."""


class HostCopies:
    """Copies of groups of tensors in host memory, which stays allocated for the next ones.

    It is one buffer per group, page-locked where a GPU copies into it. torch's own pinned memory would be rounded up to
    a power of two.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def copy(self, name: str, group: TensorGroup) -> TensorGroup:
        """Copy what this rank writes of a group. A copy from a GPU is complete once its stream is."""
        sizes = {key: -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for key, tensor in group.local.items()}
        is_cuda = any(tensor.is_cuda for tensor in group.local.values())
        buffer = self._buffer(name, sum(sizes.values()), is_cuda)
        copies, start = {}, 0
        for key, tensor in group.local.items():
            copies[key] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key].copy_(tensor, non_blocking=True)
            start += sizes[key]
        return replace(group, local=copies)

    def _buffer(self, name: str, size: int, page_locked: bool) -> Tensor:
        found = self.buffers.get(name)
        if found is None or len(found) != size:
            self.buffers[name] = found = torch.empty(size, dtype=torch.uint8)
            if page_locked and size:  # where the system refuses it, copies are correct, but slower
                cuda_runtime().cudaHostRegister(found.data_ptr(), size, 0)
        return found

    def release(self) -> None:
        for buffer in self.buffers.values():
            if buffer.is_pinned():
                cuda_runtime().cudaHostUnregister(buffer.data_ptr())
        self.buffers.clear()


def cuda_runtime() -> Any:
    return torch.cuda.cudart()


class BackgroundSaver:
    """Writes one snapshot at a time in a thread, whose collectives go over a process group of its own."""

    def __init__(self, world: World) -> None:
        """Collective."""
        self.world, self.copies = world.for_thread(), HostCopies()
        self.pool = ThreadPool(1)  # its thread ends with the process, as in verification.py
        self.running: AsyncResult[Path] | None = None

    def start(self, snapshot: Snapshot, save: Callable[[Snapshot, World], Path]) -> None:
        """Copy what a snapshot holds, and begin to save the copy. Collective. `wait` must have returned before."""
        # One after the other, so that an engine converts one group at a time.
        copied = {name: self.copies.copy(name, make()) for name, make in snapshot.groups.items()}
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        groups = {name: partial(copied.__getitem__, name) for name in copied}
        self.running = self.pool.apply_async(save, (replace(snapshot, groups=groups), self.world))

    @property
    def has_failed(self) -> bool:
        return self.running is not None and self.running.ready() and not self.running.successful()

    def wait(self) -> None:
        """Wait until the snapshot is saved. Raises what its thread raised, once."""
        running, self.running = self.running, None
        if running is not None:
            running.get()

    def close(self) -> None:
        """Wait without raising: what ended the run is the error to report."""
        if self.running is not None:
            self.running.wait()
        self.pool.close()
        self.copies.release()
        with suppress(dist.DistError, RuntimeError):  # other ranks may be gone
            dist.destroy_process_group(self.world.group)
