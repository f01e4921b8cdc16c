"""Activations for the backward pass: which are recomputed, and where the others are held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.private_api import of_torch
from simpletuner.settings.declared.sections import Settings


def memory_budget(settings: Settings) -> float | None:
    """Return the share of activations that compiled blocks keep; None where gradient_checkpointing decides.

    The one place that chooses between recomputing whole blocks and leaving it to the compiler.
    """
    return settings.training.activation_memory_budget if settings.compile.is_on else None


def set_recomputation(model: nn.Module, settings: Settings) -> None:
    """Let whole blocks be recomputed, or the compiler choose what to keep, or keep everything."""
    budget = memory_budget(settings)
    # Read when a graph is compiled, at a block's first call. 1.0 is torch's default: operators that are fused
    # with others are recomputed, products are not.
    of_torch.set_activation_memory_budget(1.0 if budget is None else budget)
    if budget is None and settings.training.gradient_checkpointing:
        model.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]


def describe_activations(settings: Settings) -> str:
    budget = memory_budget(settings)
    if budget is not None:
        kept = f"compiled blocks keep {budget:.0%}"
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


def offload_activations(model: nn.Module) -> None:
    """Hold what a forward pass saves in the machine's memory, in place."""
    own_forward = model.forward

    def forward(*args: object, **kwargs: object) -> Any:
        with HostMemory():
            return own_forward(*args, **kwargs)

    model.forward = forward
