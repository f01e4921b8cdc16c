"""Host memory that a GPU copies into without waiting."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


class HostBuffer:
    """A block of host memory with the bytes of such tensors, in their order; `views` are these by name.

    Each must begin at a multiple of its element size. The block is page-locked if asked: torch's own pinned
    memory would be rounded up to a power of two.
    """

    def __init__(self, tensors: Mapping[str, Tensor], page_locked: bool) -> None:
        sizes = [tensor.nbytes for tensor in tensors.values()]
        self.block = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = zip(tensors.items(), self.block.split(sizes), strict=True)
        self.views = {name: part.view(tensor.dtype).view(tensor.shape) for (name, tensor), part in parts}
        if page_locked and len(self.block):
            lock_pages(self.block)

    def release(self) -> None:
        """Unlock the memory, which is free once no view of it is left."""
        if torch.cuda.is_initialized() and self.block.is_pinned():
            cuda_runtime().cudaHostUnregister(self.block.data_ptr())


def lock_pages(block: Tensor) -> None:
    """Lock a block of memory. If the system refuses (WSL2, container limits), copies are slower."""
    # int: it returns an enum of which cudaSuccess is true, too.
    if int(cuda_runtime().cudaHostRegister(block.data_ptr(), block.nbytes, 0)):
        # The runtime keeps the error for the next kernel launch to raise: this one does, and is no loss.
        with suppress(RuntimeError):
            torch.ones((), device="cuda")


def cuda_runtime() -> Any:
    return torch.cuda.cudart()
