"""What the loop asks of an engine, and the one place that chooses and wraps.

These questions, because they are all that differ between one rank, data-parallel, FSDP2 and ZeRO: what to call, when to
reduce gradients, how to go backward, how to update, and what the named state is. That has two forms: the slices that an
engine keeps of its float32 weights, in which EMA follows them at each step, and the one form that checkpoints hold.
Checkpoints, EMA and validation are built on these and on `module`, so they work with every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from simpletuner.parallel.compilation import compile_in_place
from simpletuner.parallel.engine import Change, MakeOptimizer
from simpletuner.parallel.fsdp2 import shard, sharded
from simpletuner.parallel.moments import Moments, NamedTensors
from simpletuner.parallel.replicated import replicated
from simpletuner.parallel.world import World
from simpletuner.settings.sections import Settings


class Strategy(Protocol):
    """One engine around one denoiser and its optimizer."""

    @property
    def model(self) -> nn.Module:
        """What a training step calls."""
        ...

    @property
    def module(self) -> nn.Module:
        """The denoiser itself, with its own parameter names; drawing calls it, on all ranks together."""
        ...

    @property
    def forward_pass(self) -> Callable[[bool], AbstractContextManager[None]]:
        """What surrounds forward and backward of one micro-batch; gradients are reduced if it is the last."""
        ...

    @property
    def drawing(self) -> Callable[[], AbstractContextManager[None]]:
        """What surrounds calls of `module` outside training."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch."""
        ...

    def update(self, learning_rate: float, max_grad_norm: float) -> Tensor:
        """Clip (0: do not), step, clear the gradients; return the global gradient norm before clipping."""
        ...

    @property
    def size(self) -> int:
        """Return the number of parameters, over all ranks."""
        ...

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every weight by name, parameters in float32; it is valid until the next one is
        asked for, since an engine may have to fetch it."""
        ...

    def rewrite(self, change: Change) -> None:
        """Let `change` write into each of those parts; the weights that compute follow. All ranks take part."""
        ...

    def neutral(self, name: str, part: Tensor) -> Tensor:
        """Return a weight's part, or a tensor of its layout, as checkpoints hold it: sharded by rows over the ranks, as
        a DTensor on the part's device, or whole. All ranks take part."""
        ...

    def part_of(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of what `neutral` returned. All ranks take part."""
        ...

    def moments(self) -> Moments:
        """Return the optimizer's state by moment and parameter name, as checkpoints hold it."""
        ...

    def restore(self, steps: int, moments: Iterable[str], read: Callable[[str, NamedTensors], None]) -> None:
        """Put back what `moments` returned, in this run or another: `read` fills the tensors of one moment."""
        ...

    def close(self) -> None:
        """Give back what the process and its disks would keep."""
        ...


def compute_dtype(settings: Settings) -> torch.dtype:
    """Return the dtype of activations."""
    return torch.bfloat16 if settings.training.mixed_precision == "bf16" else torch.float32


def build_strategy(
    model: nn.Module,
    blocks: tuple[str, ...],
    settings: Settings,
    world: World,
    load_weights: Callable[[dict[str, Tensor]], None],
    make_optimizer: MakeOptimizer,
) -> Strategy:
    """Wrap a denoiser that is on the meta device, give it memory and weights, and return its engine.

    The order is fixed: activation checkpointing, compiling, sharding, memory, weights, engine. Compiling comes before
    sharding, whose hooks are then called between the compiled parts; sharding comes before memory, so that no rank ever
    holds more than its share; weights come before the engine, which may copy them.
    """
    dtype, parallel = compute_dtype(settings), settings.parallel
    model.train()
    if settings.training.gradient_checkpointing:
        model.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    if settings.compile.dynamo_backend != "no":
        compile_in_place(model, blocks, settings.compile)
    if parallel.zero_stage is not None:
        from simpletuner.parallel.zero.building import zero  # importing DeepSpeed takes seconds

        return zero(model, settings, world, dtype, load_weights, make_optimizer)
    if parallel.fsdp_enable:
        shard(model, blocks, parallel, dtype, world)
    give_memory(model, world.device)
    load_weights(model.state_dict())
    if parallel.fsdp_enable:
        return sharded(model, make_optimizer)
    return replicated(model, make_optimizer, world, dtype)


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocate float32 parameters (of this rank's shards only) on the device, and keep the buffers' values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
