"""What ranks do with torch's compiler."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import ranks
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, distribute_tensor

from simpletuner.parallel.engine import Engine
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.world import World, joined_world
from simpletuner.settings.declared.sections import Compile, Optimizer, Parallel, Settings, Training
from simpletuner.training.build import build_engine
from simpletuner.training.optimizers import make_optimizer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def losses_by_backend(folder: str, compiler_cache: str, fsdp: bool) -> None:
    """Write the losses of a few steps of a small model, compiled by inductor and not."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiler_cache
    with joined_world() as world:
        losses = {backend: losses_of(backend, fsdp, world) for backend in ("no", "inductor")}
        losses["graphs"] = [counters["stats"]["unique_graphs"]]
        Path(folder, f"rank{world.rank}.json").write_text(json.dumps(losses))


def small_engine(world: World, parallel: Parallel, **sections: Any) -> Engine:
    """Build the engine of a model of two blocks, whose weights are the same on every rank."""
    with torch.device("meta"):
        model = Model()
    settings = Settings(
        parallel=parallel, training=Training(mixed_precision="no", gradient_checkpointing=False), **sections
    )
    torch.manual_seed(0)
    weights = Model().state_dict()

    def load(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            whole = weights[name]
            sharded = isinstance(tensor, DTensor)
            tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements) if sharded else whole)

    optimizer = partial(make_optimizer, settings=Optimizer())
    return build_engine(model, ("Block",), settings, build_mesh(settings, world), load, optimizer)


def losses_of(backend: str, fsdp: bool, world: World) -> list[float]:
    compiled = Compile(dynamo_backend=backend, dynamo_fullgraph=True)
    engine = small_engine(world, Parallel(fsdp_enable=fsdp), compile=compiled)
    losses = []
    for _ in range(3):
        with engine.micro_batch(True):
            loss = engine.model(torch.full((4, 16), 1.0 + world.rank, requires_grad=True)).square().mean()
            engine.backward(loss)
        losses.append(loss.item())
        engine.set_learning_rate(1e-2)
        engine.step(0)
    return losses


def command_line_without_cxx(arguments: list[str]) -> None:
    """Run the real command line in a process whose C++ compiler is missing."""
    import torch._inductor.config

    torch._inductor.config.cpp.cxx = ("no-such-compiler",)
    ranks.command_line(arguments)
