"""What happens on the fake device: memory, waits, launches, collectives, and the order of streams."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorDeviceMismatchError, unset_fake_temporarily
from torch.distributed.tensor import DTensor

from fake_gpu.device import DEVICE, LIBRARY, RUNTIME
from fake_gpu.stream_order import HOST, StreamOrder
from simpletuner.counting.flops import tensors_among
from simpletuner.counting.operator_results import result_of
from simpletuner.counting.step_counter import ALLOCATIONS, MemoryCounter, Work

aten = torch.ops.aten
BLOCK_BYTES = 512
"""The caching allocator rounds up to so many."""
COLLECTIVES = {
    "all-gather": ("_allgather_base_", "all_gather", "allgather"),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter"),
    "all-reduce": ("allreduce_", "all_reduce"),
    "all-to-all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
}


def where() -> str:
    """Return the innermost line of simpletuner, or of a library that it has called."""
    frame: FrameType | None = sys._getframe(1)
    places: dict[str, tuple[str, int]] = {}
    while frame is not None and "own" not in places:
        file = frame.f_code.co_filename
        if "/simpletuner/" in file:
            places["own"] = file.rpartition("/simpletuner/")[2], frame.f_lineno
        elif not any(part in file for part in ("/tests/support/", "/torch/", "/lib/python3.")) or "/diffusers/" in file:
            places.setdefault("library", (file.rpartition("site-packages/")[2], frame.f_lineno))
        frame = frame.f_back
    return ", from ".join(f"{file}:{line}" for file, line in places.values())


def written(func: Any, args: Any) -> list[Tensor]:
    """Return the arguments that an operator changes."""
    declared = zip(func._schema.arguments, args, strict=False)
    changed = [each for argument, each in declared if argument.alias_info is not None and argument.alias_info.is_write]
    return [*tensors_among(changed)]


class Recorder(MemoryCounter):
    """Record what an eager step does with tensors on the fake device.

    `waits`: for the device, or copies that would wait. `collectives`: (kind, dtype, device) with their number, and
    `collective_bytes` with those of whole tensors.
    """

    def __init__(self, checks_order: bool = True) -> None:
        super().__init__()
        self.waits, self.mixed_devices = Counter[str](), Counter[str]()
        self.collectives, self.collective_bytes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        self.pinned: Any = weakref.WeakSet()
        self.order = StreamOrder(where) if checks_order else None

    def restart(self) -> None:
        """Forget all but what is in memory."""
        for counter in (self.waits, self.mixed_devices, self.collectives, self.collective_bytes):
            counter.clear()
        self.work, RUNTIME.spins = Work(), 0
        self.restart_peak()

    # Memory

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or storage in self.known:
            return
        record = self.known[storage] = [rounded(storage.nbytes())]
        self.grow(record[0])
        accesses = self.order.make(storage, LIBRARY.current_stream_id()) if self.order is not None else None
        weakref.finalize(storage, self.freed, record, accesses)

    def grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def freed(self, record: list[int], accesses: Any) -> None:
        if record[0] and self.order is not None:
            self.order.free(accesses)
        self.live -= record[0]

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Follow FSDP2, which frees gathered weights by giving their storage no bytes."""
        if (record := self.known.get(storage)) is None:
            return
        if record[0] and not size and self.order is not None and storage in self.order.accesses:
            self.order.free(self.order.accesses[storage])
        self.grow(rounded(size) - record[0])
        record[0] = rounded(size)

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) or each.__module__.startswith("torchao") for each in types):
            return NotImplemented  # their own code calls back with plain tensors: a wrapper has no memory
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if (answer := self.answers.get(func.overloadpacket)) is not None:
            return answer(self, *args, **kwargs)
        tensors = [*tensors_among((args, list(kwargs.values())))]
        if is_computed(tensors, kwargs.get("device")):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.overloadpacket in (aten.copy_, aten._to_copy):
            self.see_copy(func.overloadpacket, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self.see_collective(func, tensors)
        return self.run(func, args, kwargs, tensors)

    def run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        try:
            # of 0.3 ms that FakeTensorMode takes for an operator that it knows, a tenth
            outputs = result_of(func, args, kwargs) if func.namespace == "aten" else func(*args, **kwargs)
        except FakeTensorDeviceMismatchError:
            self.mixed_devices[where()] += 1
            raise
        made = [*tensors_among([outputs])]
        for each in made:
            self.add(each)
        on_gpu = any(each.device.type == "cuda" for each in (*tensors, *made))
        copies = func.overloadpacket is aten._to_copy and kwargs.get("non_blocking") and on_gpu
        if kwargs.get("pin_memory") or copies:
            self.pinned.update(each.untyped_storage() for each in made if each.device.type == "cpu")
        if func.is_view or func.overloadpacket in ALLOCATIONS:
            return outputs
        if on_gpu:
            RUNTIME.launch()
            if func.namespace == "simpletuner":  # a kernel reads all it is given, and writes some of it
                self.work.launches += 1
                self.work.moved += sum(each.nbytes for each in (*tensors, *written(func, args)))
            elif func.namespace == "aten":
                self.count_work(func.overloadpacket, args, kwargs, outputs, made)
        if self.order is not None:
            stream = LIBRARY.current_stream_id() if on_gpu else HOST
            self.order.follow(func._schema.name, accessed(func, args, kwargs, made), stream)
        return outputs

    def read(self, tensor: Tensor) -> Any:
        """Answer `.item()`."""
        if tensor.device.type == "cuda":
            self.wait("item()")
        elif self.order is not None:
            self.order.follow("item()", [(tensor, False)], HOST)
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                return aten._local_scalar_dense(tensor)
        return True if tensor.dtype == torch.bool else 0.5 if tensor.is_floating_point() else 1

    def pin(self, tensor: Tensor, device: Any = None) -> Tensor:
        """Answer `pin_memory()`; of a real tensor, such as a mask whose sum becomes a shape, with a real copy."""
        if isinstance(tensor, FakeTensor):
            made = torch.empty_like(tensor)
        else:
            with unset_fake_temporarily():
                made = tensor.clone()
        self.pinned.add(made.untyped_storage())
        return made

    def is_pinned(self, tensor: Tensor, device: Any = None) -> bool:
        storage = tensor.untyped_storage()
        return storage in self.pinned or storage in RUNTIME.locked

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        if self.order is not None and (known := self.order.accesses.get(tensor.untyped_storage())) is not None:
            known.recorded.add(stream.stream_id)

    answers = {
        aten._local_scalar_dense: read,
        aten._pin_memory: pin,
        aten.is_pinned: is_pinned,
        aten.record_stream: record_stream,
    }

    # Waits and collectives

    def wait(self, why: str) -> None:
        self.waits[f"{why}: {where()}"] += 1
        if self.order is not None:
            self.order.catch_up()
            self.order.wait_for_device()

    def see_copy(self, packet: Any, args: Any, kwargs: Any) -> None:
        if packet is aten.copy_:
            into, source, *more = args
            target, non_blocking = into.device, more[0] if more else kwargs.get("non_blocking", False)
        else:
            (source,), into, non_blocking = args, None, kwargs.get("non_blocking", False)
            target = torch.device(kwargs.get("device") or source.device)
        ways = source.device.type, target.type
        if ways == ("cpu", "cuda") and not self.is_pinned(source):
            self.wait(f"copy of {source.nbytes} B from pageable memory")
        elif ways in (("cpu", "cuda"), ("cuda", "cpu")) and not non_blocking:
            self.wait("copy that blocks")
        elif ways == ("cuda", "cpu") and into is not None and not self.is_pinned(into):
            self.wait("copy into pageable memory")

    def see_collective(self, func: Any, tensors: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        kind = next((kind for kind, names in COLLECTIVES.items() if name.startswith(names)), None)
        if kind is None:
            return
        whole = max(tensors, key=lambda each: each.nbytes)
        key = kind, str(whole.dtype).removeprefix("torch."), whole.device.type
        self.collectives[key] += 1
        self.collective_bytes[key] += whole.nbytes


def rounded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def is_computed(tensors: list[Tensor], device: Any) -> bool:
    """Return whether all tensors are real and stay on one device without a GPU.

    On the CPU these are masks, whose sums become shapes; on the meta device a model that has no memory yet.
    """
    kinds = {each.device.type for each in tensors} | ({torch.device(device).type} if device is not None else set())
    return bool(tensors) and not any(isinstance(each, FakeTensor) for each in tensors) and kinds < {"cpu", "meta"}


def accessed(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors of an operator, each with whether it is written."""
    is_collective = func.namespace in ("c10d", "_c10d_functional")  # whose schemas do not say what they write
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = is_collective or (argument.alias_info is not None and argument.alias_info.is_write)
        for each in tensors_among([value]):
            if each.layout == torch.strided:
                yield each, writes
    for each in made:
        yield each, True


def follow_resizing() -> None:
    """Let the recorder that is active know of storages that are given another size."""
    own_resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            if isinstance(mode, Recorder):
                mode.resized(storage, size)
        return own_resize(storage, size)

    torch.UntypedStorage.resize_ = resize_


__all__ = ["DEVICE", "Recorder", "follow_resizing"]
