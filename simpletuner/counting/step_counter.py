"""A forward and a backward pass on fake tensors, counted as they run: bytes, FLOPs, launches, order of gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from simpletuner.counting.flops import FORMULAS, CudaAutocast
from simpletuner.counting.operator_results import result_of
from simpletuner.parallel.model.activations import CastParameter, HostMemory
from simpletuner.private_api.of_torch import FakeTensor, TorchDispatchMode, device_of, outside_function_modes, tree_iter

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.empty_permuted,
}
"""Operators that launch no kernel."""


@dataclass
class Work:
    """FLOPs of operators, bytes that they read and write, and their number."""

    moved: int = 0
    """Bytes read and written by operators that are neither products nor attention."""
    launches: int = 0
    flops: Counter[object] = field(default_factory=Counter)

    def add(self, other: Work) -> None:
        self.moved += other.moved
        self.launches += other.launches
        self.flops.update(other.flops)


@dataclass(eq=False)
class MemoryCounter(TorchDispatchMode):
    """Follow the bytes of all tensors made within, from their making until nothing refers to them."""

    live: int = 0
    peak: int = 0
    on_host: int = 0
    """Bytes of tensors on the meta device, which stands for the machine's memory."""
    work: Work = field(default_factory=Work)
    key_value_copies: int = 1
    """Copies of keys and values that a rank holds: context parallelism gathers them whole on each."""
    known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = field(default_factory=weakref.WeakKeyDictionary)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: object = None) -> object:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            # of 72,000 calls in a step of SDXL 52,000: each would be dispatched once more
            return device_of(args[0])
        with outside_function_modes():
            return self.count(func, args, kwargs or {})

    def count(self, func: Any, args: Any, kwargs: Any) -> object:
        outputs = result_of(func, args, kwargs)
        if func.namespace != "aten":
            return outputs
        made = [each for each in tree_iter(outputs) if isinstance(each, Tensor)]
        for each in made:
            self.add(each)
        if func.overloadpacket in KEEPS_KEY_AND_VALUE:
            self.repeat(args[1:3])
        if not (func.is_view or func.overloadpacket in ALLOCATIONS):
            self.count_work(func.overloadpacket, args, kwargs, outputs, made)
        return outputs

    def count_work(self, operator: object, args: Any, kwargs: Any, outputs: object, made: list[Tensor]) -> None:
        self.work.launches += 1
        if (formula := FLOPS.get(operator)) is not None:
            self.work.flops[operator] += formula(*args, **kwargs, out_val=outputs)
            return
        read = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        self.work.moved += sum(each.numel() * each.element_size() for each in [*read, *made])

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # Views share a storage, which counts once.
        if storage not in self.known:
            self.known[storage] = size = storage.nbytes()
            self.hold(size, tensor.is_meta)
            self.peak = max(self.peak, self.live)
            # torch keeps one Python object per storage while a tensor uses it: with it goes the memory.
            weakref.finalize(storage, self.hold, -size, tensor.is_meta)

    def repeat(self, tensors: Iterable[Tensor]) -> None:
        for each in tensors:
            size = (self.key_value_copies - 1) * each.nbytes
            self.hold(size, each.is_meta)
            weakref.finalize(each.untyped_storage(), self.hold, -size, each.is_meta)
        self.peak = max(self.peak, self.live)

    def hold(self, size: int, on_host: bool) -> None:
        if on_host:
            self.on_host += size
        else:
            self.live += size

    def exclude(self, tensors: Iterator[Tensor]) -> None:
        """Leave out what was there before."""
        for each in tensors:
            self.known[each.untyped_storage()] = 0

    def restart_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = self.peak, self.live
        return peak


class HeldBytes:
    """Bytes that are live as long as this object is."""

    def __init__(self, memory: MemoryCounter, size: int, on_host: bool = False) -> None:
        memory.hold(size, on_host)
        memory.peak = max(memory.peak, memory.live)
        weakref.finalize(self, memory.hold, -size, on_host)


def attention_forward(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    return sdpa_flop_count(query, key, value)


def attention_backward(
    gradient: list[int], query: list[int], key: list[int], value: list[int], *_: object, **__: object
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


# The CPU's flash attention keeps what CUDA's does: query, key, value, output and logsumexp.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(attention_forward),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(attention_backward),
}
KEEPS_KEY_AND_VALUE = {aten._scaled_dot_product_flash_attention_for_cpu}
FLOPS = FORMULAS | ATTENTION
"""FLOPs of those operators whose time is that of their arithmetic."""


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
    cast_weights: list[HeldBytes] = field(default_factory=list)
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
        with self.memory, self.casts():
            yield

    def casts(self) -> AbstractContextManager[object]:
        return CudaAutocast() if self.execution.on_gpu else nullcontext()

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
