"""Run on ranks: conversion of partitions, and a model made of the shapes that go wrong first."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from engines import ENGINES, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from simpletuner.deepspeed.partitions import ElementRange, RowShards
from simpletuner.parallel.engine import Engine
from simpletuner.parallel.mesh import Mesh, build_mesh
from simpletuner.parallel.world import World, joined_world
from simpletuner.settings.declared.sections import Ema, Optimizer, Parallel, Settings, Training
from simpletuner.training.alarms import WATCHED_STEPS, GradientWatch
from simpletuner.training.build import build_engine
from simpletuner.training.ema import EMA
from simpletuner.training.optimizers import make_optimizer

SHAPES = [(7, 3), (1,), (3,), (2, 5, 2), (13,), (4, 4)]


def to_rows_and_back(report: str) -> None:
    """Write whether partitions, cut as at stages 1 and 2, become the right row shards and the same partitions again."""
    with joined_world() as world:
        right, mesh = [], Mesh(world, dp_shard=world.size)
        for number, shape in enumerate(SHAPES):
            name, values = str(shape), torch.randn(shape, generator=torch.Generator().manual_seed(number))
            for have in cuts(values.numel(), world.size):
                first, end = have[world.rank]
                row_shards, partition = RowShards({name: values.shape}, mesh), values.flatten()[first:end]
                rows = row_shards.from_partition(name, partition, have)
                right.append(torch.equal(rows.full_tensor(), values))
                right.append(torch.equal(row_shards.to_partition(name, rows, have), partition))
        Path(f"{report}.{world.rank}").write_text(json.dumps(right))


def cuts(elements: int, ranks: int) -> list[list[ElementRange]]:
    """Return ways to partition a parameter: equally, all on the last rank, all but one element on the first."""
    return [[ElementRange(start, end) for start, end in cut] for cut in edges(elements, ranks)]


def edges(elements: int, ranks: int) -> list[list[tuple[int, int]]]:
    share = -(-elements // ranks)
    equal = [(min(rank * share, elements), min((rank + 1) * share, elements)) for rank in range(ranks)]
    last = [(0, 0)] * (ranks - 1) + [(0, elements)]
    if ranks == 1:
        return [equal, last]
    return [equal, last, [(0, elements - 1), (elements - 1, elements)] + [(elements, elements)] * (ranks - 2)]


class Odd(nn.Module):
    """Parameters of one element, fewer rows than ranks, shared, frozen; buffers that are saved and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.again = nn.Linear(5, 3, bias=False)
        self.again.weight = self.inner.weight
        self.scale = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.inner.weight.dtype
        y = self.inner((x - self.mean).to(dtype)) + self.again((self.table * 0.1).to(dtype)) * self.scale
        for block in self.blocks:
            y = block(y @ self.frozen.to(y.dtype)) * self.scale
        return y


class Silent(Odd):
    """An Odd with a weight whose gradient is exactly 0, and one that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = nn.Parameter(torch.randn(4, 2))
        self.unused = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0 * self.silent).sum()


def opened(
    name: str,
    world: World,
    dtype: str,
    of: type[Odd] = Odd,
    chosen: Optimizer = Optimizer(),  # noqa: B008
) -> Engine:
    """Build an engine for an Odd with the weights of seed 1."""
    torch.manual_seed(0)
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = of()
    torch.manual_seed(1)
    weights = of().state_dict()

    def load(tensors: dict[str, Tensor]) -> None:
        for each, tensor in tensors.items():
            value = weights[each]
            sharded = isinstance(tensor, DTensor)
            tensor.copy_(distribute_tensor(value, tensor.device_mesh, tensor.placements) if sharded else value)

    settings = Settings(
        parallel=Parallel(**ENGINES[name]), training=Training(mixed_precision=dtype, gradient_checkpointing=False)
    )
    settings = settings.model_copy(update={"optimizer": chosen})
    optimizer = partial(make_optimizer, settings=chosen)
    return build_engine(model, ("Sequential",), settings, build_mesh(settings, world), load, optimizer)


def odd_shapes(names: list[str], dtype: str, report: str) -> None:
    """Train an Odd for three steps on each engine, with EMA; write weights, averages, moments and losses."""
    with joined_world() as world:
        found = {}
        for name in names:
            with closing(opened(name, world, dtype)) as engine:
                average = EMA(engine, Ema(use_ema=True))
                begun = to_checkpoint(engine)
                losses = [step(engine, world) for _ in range(3)]
                average.update(1)
                trained = to_checkpoint(engine)
                with average.swapped_in():
                    shown, loss = to_checkpoint(engine), step_without_update(engine, world)
                back = to_checkpoint(engine)
                saved = {
                    m: {k: whole(t) for k, t in make().items()} for m, make in engine.optimizer_state().tensors.items()
                }
                torch.save(
                    {
                        "begun": begun,
                        "trained": trained,
                        "shown": shown,
                        "back": back,
                        "average": {key: whole(value) for key, value in average.tensors().items()},
                        "losses": [*losses, loss],
                        "moments": saved,
                        "size": engine.num_parameters,
                    },
                    f"{report}.{name}.{world.rank}",
                )
                found[name] = losses
        Path(report).write_text(json.dumps(found))


def silent_weights(names: list[str], report: str) -> None:
    """Write, for each engine, the weights in which rank 0 has seen no gradient; `released` in a name frees them."""
    with joined_world() as world:
        found = {}
        for name in names:
            engine_name, _, way = name.partition(" ")
            chosen = Optimizer(optimizer_release_gradients=way == "released", max_grad_norm=0)
            with closing(opened(engine_name, world, "no", Silent, chosen)) as engine:
                watched = engine.module.named_parameters() if world.is_first else ()
                watch = GradientWatch(watched, world.device)
                for _ in range(WATCHED_STEPS + 2):
                    step(engine, world, 0.0)
                    found[name] = watch.next_step() if world.is_first else None
        Path(f"{report}.{world.rank}").write_text(json.dumps(found))


def to_checkpoint(engine: Engine) -> dict[str, Tensor]:
    """Return every weight whole."""
    return {name: whole(engine.to_checkpoint(name, part)).clone() for name, part in engine.local_shards()}


def step(engine: Engine, world: World, max_grad_norm: float = 1.0) -> float:
    """Take a step on data that differs by rank."""
    loss = forward(engine, world)
    engine.set_learning_rate(1e-2)
    engine.step(max_grad_norm)
    return loss


def step_without_update(engine: Engine, world: World) -> float:
    """Return the loss alone."""
    with torch.no_grad(), engine.inference():
        return engine.module(inputs(engine, world)).square().mean().item()


def forward(engine: Engine, world: World) -> float:
    with engine.micro_batch(True):
        loss = engine.model(inputs(engine, world)).square().mean()
        engine.backward(loss)
    return loss.item()


def inputs(engine: Engine, world: World) -> Tensor:
    return torch.full((4, 5), 1.0 + world.rank) * torch.arange(1.0, 6.0)
