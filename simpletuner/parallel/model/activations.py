"""Activations for the backward pass: which are recomputed, and where the others are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from simpletuner.private_api import of_torch
from simpletuner.private_api.of_torch import TorchDispatchMode, tree_flatten, tree_iter, tree_map_only, tree_unflatten
from simpletuner.settings.declared.sections import Settings


def set_recomputation(model: nn.Module, settings: Settings) -> None:
    """Let whole blocks be recomputed, or what is cheap of them, or keep everything."""
    training, budget = settings.training, settings.training.activation_memory_budget
    # Read when a graph is compiled, at a block's first call. 1.0 is torch's default: operators that are fused
    # with others are recomputed, products are not.
    of_torch.set_activation_memory_budget(1.0 if budget is None else budget)
    if budget is None and training.gradient_checkpointing:
        recompute_within(model, 0.0)
    elif budget is not None and not settings.compile.is_on:
        recompute_within(model, budget, HostMemory() if training.offload_activations else None)


def recompute_within(model: Any, budget: float | None, memory: HostMemory | None = None) -> None:
    """Keep a share of the products in blocks that are not compiled, in `memory`; None: recompute nothing."""
    if budget is None:
        model.disable_gradient_checkpointing()
    else:
        # diffusers' own function for no share: a dispatch mode takes some microseconds per operator.
        model.enable_gradient_checkpointing(SelectiveRecomputation(budget, memory) if budget else None)


def describe_activations(settings: Settings) -> str:
    budget = settings.training.activation_memory_budget
    if budget is not None:
        kept = f"{'compiled ' * settings.compile.is_on}blocks keep {budget:.0%}"
    else:
        kept = "blocks are recomputed" if settings.training.gradient_checkpointing else "all kept"
    return kept + ", in the machine's memory" * settings.training.offload_activations


@dataclass(frozen=True)
class CastParameter:
    """A view of what autocast has made of a parameter, which is cast again where it is needed."""

    parameter: nn.Parameter
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def cast(self) -> Tensor:
        return self.parameter.detach().to(self.dtype).as_strided(self.size, self.stride, self.offset)


def cast_from(tensor: Tensor) -> nn.Parameter | None:
    """Parameter that a tensor is a cast of; None for others."""
    if tensor.grad_fn is None or tensor.grad_fn.name() != "ToCopyBackward0":
        return None
    ((source, _),) = tensor.grad_fn.next_functions
    parameter = getattr(source, "variable", None)  # of the node that accumulates a parameter's gradient
    return parameter if isinstance(parameter, nn.Parameter) else None


class HostMemory(saved_tensors_hooks):
    """Within this context, what autograd saves is copied to the machine's memory, and back when backward
    needs it.

    As torch's save_on_cpu, except for parameters, which have their own place: it would copy gathered weights,
    and autocast's casts of weights, for FLUX.1 24 GB each way per micro-batch. With recomputation a block
    saves its inputs alone. Copies are queued on the computing stream.
    """

    def __init__(self, host: str = "cpu") -> None:
        """`host` is another device than the machine's memory where nothing but bytes is wanted."""
        super().__init__(self.pack, self.unpack)
        self.host = host

    def pack(self, tensor: Tensor) -> tuple[torch.device, Tensor] | CastParameter:
        owner = tensor if tensor._base is None else tensor._base  # a linear layer saves its weight transposed
        if isinstance(owner, nn.Parameter):
            return tensor.device, tensor
        if (parameter := cast_from(owner)) is not None:
            return CastParameter(parameter, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        # With the same strides: compiled graphs read what they saved by address.
        held = torch.empty_like(tensor, device=self.host, pin_memory=tensor.is_cuda)
        return tensor.device, held.copy_(tensor, non_blocking=True)

    def unpack(self, packed: tuple[torch.device, Tensor] | CastParameter) -> Tensor:
        if isinstance(packed, CastParameter):
            return packed.cast()
        device, tensor = packed
        return tensor.to(device, non_blocking=True)


aten = torch.ops.aten


def of_argument(position: int) -> Callable[[Sequence[Tensor]], int]:
    return lambda inputs: inputs[position].shape[-1]


def of_keys(inputs: Sequence[Tensor]) -> int:
    return 2 * inputs[1].shape[-2]  # both products of attention


MULTIPLICATIONS: dict[object, Callable[[Sequence[Tensor]], int]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten._int_mm, aten._scaled_mm), of_argument(0)),
    **dict.fromkeys((aten.addmm, aten.baddbmm), of_argument(1)),
    aten.convolution: lambda inputs: inputs[1][0].numel(),
    aten._scaled_dot_product_flash_attention: of_keys,
    aten._scaled_dot_product_flash_attention_for_cpu: of_keys,
    aten._scaled_dot_product_efficient_attention: of_keys,
    aten._scaled_dot_product_cudnn_attention: of_keys,
    aten._scaled_dot_product_fused_attention_overrideable: of_keys,
}
"""Operators whose outputs are worth keeping: multiplications for each value of an output, by inputs."""


def held(output: object, memory: HostMemory | None) -> Callable[[], object]:
    """Return a function that gives an operator's output back, from `memory` if there is one."""
    leaves, spec = tree_flatten(tree_map_only(Tensor, Tensor.detach, output))  # with a graph it would keep itself alive
    if memory is None:
        return lambda: tree_unflatten(leaves, spec)
    packed = [memory.pack(each) if isinstance(each, Tensor) else each for each in leaves]
    return lambda: tree_unflatten([memory.unpack(each) if isinstance(each, tuple) else each for each in packed], spec)


class Region:
    """Record of one call of a block: sizes of the outputs of products and attention, and the kept ones."""

    def __init__(self, kept: frozenset[int], memory: HostMemory | None) -> None:
        self.kept, self.memory = kept, memory
        self.sizes: list[tuple[float, int]] = []
        """(multiplications per byte, bytes) of each output; no bytes for one that cannot be kept"""
        self.outputs: dict[int, Callable[[], object]] = {}
        self.numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        """Numbers of outputs by their storages."""

    def contexts(self) -> tuple[Keeping, Returning]:
        return Keeping(self), Returning(self)

    def add(self, multiplications: int, output: object) -> None:
        tensors, number = [each for each in tree_iter(output) if isinstance(each, Tensor)], len(self.sizes)
        self.numbers |= {each.untyped_storage(): number for each in tensors}
        if number in self.kept:
            self.outputs[number] = held(output, self.memory)
        self.sizes.append((multiplications / tensors[0].element_size(), sum(each.nbytes for each in tensors)))

    def forget(self, written: Iterable[Tensor]) -> None:
        """Keep no output whose memory is written into: what a layer without bias returns counts no writing
        (`+=`) into what it is a view of, so the numbers of versions do not tell.
        """
        for each in written:
            if (number := self.numbers.get(each.untyped_storage())) is not None:
                self.outputs.pop(number, None)
                self.sizes[number] = (0.0, 0)

    def dearest(self, share: float) -> frozenset[int]:
        """Return the outputs that save most for their bytes, within a share of the bytes of all."""
        room, chosen = share * sum(size for _, size in self.sizes), set[int]()
        for number in sorted(range(len(self.sizes)), key=lambda number: -self.sizes[number][0]):
            if 0 < self.sizes[number][1] <= room:
                room -= self.sizes[number][1]
                chosen.add(number)
        return frozenset(chosen)


class Keeping(TorchDispatchMode):
    """Keep outputs while a block runs forward."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if (multiplications := MULTIPLICATIONS.get(getattr(func, "overloadpacket", None))) is not None:
            self.region.add(multiplications(args), output)
        else:
            self.region.forget(of_torch.written_by(func, args, kwargs))
        return output


class Returning(TorchDispatchMode):
    """Give back what was kept while the block is run again.

    Other operators are not followed: FSDP2 gathers weights in a forward pass, but not where it is run again.
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.outputs, self.numbers = region.outputs, count()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if getattr(func, "overloadpacket", None) in MULTIPLICATIONS:
            kept = self.outputs.pop(next(self.numbers), None)
            if kept is not None:
                return kept()
        return func(*args, **(kwargs or {}))


class SelectiveRecomputation:
    """Recompute blocks in the backward pass, but for the products that take longest for their bytes.

    torch's create_selective_checkpoint_contexts counts every operator, and ends a run whose second forward
    pass has others than the first, as FSDP2's has. A block's first call for inputs of some shapes keeps
    nothing: it shows what there is to keep.
    """

    def __init__(self, share: float, memory: HostMemory | None = None) -> None:
        """`share` is of the bytes of a block's products and attention; 1 recomputes none of them."""
        self.share, self.memory = share, memory
        self.chosen: WeakKeyDictionary[nn.Module, dict[tuple[torch.Size, ...], frozenset[int]]] = WeakKeyDictionary()

    def __call__(self, block: nn.Module, *inputs: object) -> object:
        chosen = self.chosen.setdefault(block, {})
        shapes = tuple(each.shape for each in tree_iter(inputs) if isinstance(each, Tensor))
        region = Region(chosen.get(shapes, frozenset()), self.memory)
        output = checkpoint(block, *inputs, use_reentrant=False, context_fn=region.contexts)
        # The model may write into what the block returns.
        region.forget(each for each in tree_iter(output) if isinstance(each, Tensor))
        if shapes not in chosen:
            chosen[shapes] = region.dearest(self.share)
        return output


def offload_activations(model: nn.Module) -> None:
    """Hold what a forward pass saves in the machine's memory, in place."""
    own_forward = model.forward

    def forward(*args: object, **kwargs: object) -> object:
        with HostMemory():
            return own_forward(*args, **kwargs)

    model.forward = forward
