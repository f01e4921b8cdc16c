"""Counts of a forward and a backward pass on fake tensors, as they run: bytes, work, and the order of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from simpletuner.counting.flops import CudaAutocast
from simpletuner.counting.memory_counter import MemoryCounter
from simpletuner.parallel.model.activations import CastParameter, HostMemory


@dataclass(frozen=True)
class Execution:
    """Dtypes and places of a micro-batch's computation; `dtype` is the weights', or autocast's."""

    dtype: torch.dtype
    autocast: bool = False
    on_gpu: bool = False
    """Cast as CUDA's autocast does."""
    offloads: bool = False
    """Keep what the backward pass needs in the machine's memory."""
    key_value_copies: int = 1
    """See MemoryCounter."""


class MetaMemory(HostMemory):
    """HostMemory that keeps no contents: only their bytes are counted."""

    def unpack(self, packed: tuple[torch.device, Tensor] | CastParameter) -> Tensor:
        if isinstance(packed, CastParameter) or not packed[1].is_meta:
            return super().unpack(packed)
        device, tensor = packed
        return torch.empty_like(tensor, device=device)


@dataclass
class StepCounter:
    """A forward and a backward pass that are counted: of a whole model, or of one block."""

    execution: Execution
    memory: MemoryCounter
    peaks: list[int] = field(default_factory=list)
    """Most bytes before each gradient, since the one before."""
    released: list[str] = field(default_factory=list)
    """Names of the parameters, in the order of their gradients."""
    cast_weights: list[Tensor] = field(default_factory=list)
    """Stand for what autocast keeps of weights until the forward pass ends."""
    is_paused: bool = False
    """True while a block is counted alone, whose parameters have hooks of this counter, too."""

    @classmethod
    def of(cls, execution: Execution, present: Iterator[Tensor]) -> StepCounter:
        """Count nothing of what is `present` before."""
        memory = MemoryCounter(key_value_copies=execution.key_value_copies)
        memory.exclude(present)
        return cls(execution, memory)

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self.memory, CudaAutocast() if self.execution.on_gpu else nullcontext():
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        how = self.execution
        memory = MetaMemory("meta") if how.offloads else nullcontext()
        with torch.autocast("cpu", how.dtype, enabled=how.autocast), memory:
            yield
        self.cast_weights.clear()

    @contextmanager
    def gradients_released(self, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Free each gradient when it is there: engines decide how they are kept."""
        hooks = [each.register_post_accumulate_grad_hook(partial(self.release, name)) for name, each in trained.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def release(self, name: str, parameter: Tensor) -> None:
        if not self.is_paused:
            self.peaks.append(self.memory.restart_peak())
            self.released.append(name)
            parameter.grad = None
