"""Give a model on the meta device its compute-dtype weights one module at a time, as DeepSpeed needs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def materialize_model(model: nn.Module, compute_weight: Callable[[str], Tensor], config: dict[str, Any]) -> None:
    """Collective: replace all meta parameters by `compute_weight(name)`; at stage 3 partition them.

    At stage 3 no more than one module is whole on a rank at any time.
    """
    materialized: dict[int, nn.Parameter] = {}
    partition = make_partition(config) if config["zero_optimization"]["stage"] == 3 else None
    for prefix, module in model.named_modules():
        materialize_parameters(module, prefix, compute_weight, materialized)
        if partition is not None:
            partition(module)
    return_freed_memory()


def materialize_parameters(
    module: nn.Module, prefix: str, compute_weight: Callable[[str], Tensor], materialized: dict[int, nn.Parameter]
) -> None:
    """Collective: replace a module's own meta parameters by whole weights; shared parameters stay shared.

    `materialized` maps the id of each meta parameter that was replaced to the new one.
    """
    # Ids identify them: all meta parameters existed at once, before the first one was replaced.
    for name, meta in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(meta) not in materialized:
            whole = compute_weight(f"{prefix}.{name}" if prefix else name)
            materialized[id(meta)] = nn.Parameter(whole, requires_grad=meta.requires_grad)
        setattr(module, name, materialized[id(meta)])


def make_partition(config: dict[str, Any]) -> Callable[[nn.Module], None]:
    """Function that partitions a module's own parameters and frees the whole ones. It is collective."""
    import deepspeed

    first: list[Any] = []

    def partition(module: nn.Module) -> None:
        own = list(module.parameters(recurse=False))
        if own and not first:
            # Each zero.Init would open its own NVMe swapper with its own buffers, so there is one; the parameters that
            # it converts carry a method that converts more (0.19.8: `Init._convert_to_deepspeed_param`).
            deepspeed.zero.Init(module=nn.ParameterList(own), config_dict_or_path=config)
            first.extend(own[:1])
        elif own:
            first[0].convert_to_zero_parameters(param_list=own)  # skips what is partitioned already

    return partition


def return_freed_memory() -> None:
    """Return freed memory to the system (glibc's malloc_trim).

    glibc keeps freed blocks below 32 MB for itself. Here they come to as much as is in use: 774 MiB, of which
    344 were free, for a rank's quarter of a model of 463 MiB.
    """
    ctypes.CDLL(None).malloc_trim(0)


def move_buffers(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Move a model's buffers to the device, and return the persistent ones, which checkpoints hold."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


@contextmanager
def torch_linear_restored() -> Iterator[None]:
    """Restore torch's linear on exit.

    At stage 3 DeepSpeed replaces `nn.functional.linear` in the whole process, and never restores it (0.19.8:
    runtime/zero/partition_parameters.py, `_enable_mem_efficient_linear`). Another engine in this process would use it.
    """
    linear = nn.functional.linear
    try:
        yield
    finally:
        nn.functional.linear = linear
