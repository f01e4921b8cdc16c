"""Choose an engine, and wrap a denoiser in it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from simpletuner.parallel.compilation import compile_in_place
from simpletuner.parallel.ddp import replicated
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.parallel.fsdp2 import shard, sharded
from simpletuner.parallel.torch_engine import MakeOptimizer
from simpletuner.parallel.world import World
from simpletuner.settings.sections import Settings


def build_engine(
    model: nn.Module,
    blocks: tuple[str, ...],
    settings: Settings,
    world: World,
    load_weights: Callable[[dict[str, Tensor]], None],
    make_optimizer: MakeOptimizer,
) -> Engine:
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
        from simpletuner.deepspeed.engine import build_deepspeed_engine  # importing DeepSpeed takes seconds

        return build_deepspeed_engine(model, settings, world, dtype, load_weights, make_optimizer)
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
