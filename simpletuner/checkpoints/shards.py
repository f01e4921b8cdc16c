"""Assignment of each tensor's rows to the ranks that write them: all ranks make the same plan, without
communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.torch_engine import local_tensor


class WrittenShard(NamedTuple):
    """Consecutive rows of a tensor, from `row` on, or all of it; `rank` writes it. No rows are no shard."""

    rank: int
    row: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor of a checkpoint, and its shards in the order of its rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[WrittenShard, ...]

    def bytes_from(self, rank: int) -> int:
        """Return the bytes of the shards that a rank writes."""
        return self.dtype.itemsize * sum(prod(shard.shape) for shard in self.shards if shard.rank == rank)

    def shard_of(self, rank: int) -> WrittenShard:
        return next(shard for shard in self.shards if shard.rank == rank)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are saved together. `plan` is equal on all ranks, `local` holds the shards that this rank writes."""

    plan: Mapping[str, WrittenTensor]
    local: Mapping[str, Tensor]


def plan_group(tensors: NamedTensors) -> TensorGroup:
    """Choose the rank that writes each shard: of those that hold a copy of it, the one with the fewest elements."""
    loads = [0] * dist.get_world_size()
    plan: dict[str, WrittenTensor] = {}
    # Largest first, so that the ranks' loads come out even; names break ties, so that all ranks agree.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].numel(), item[0])):
        holders, shapes = holders_of(tensor), shard_shapes(tensor)
        shards, row = [], 0
        for ranks, shape in zip(holders, shapes, strict=True):
            if prod(shape) or len(shapes) == 1:
                rank = min(ranks, key=loads.__getitem__)
                loads[rank] += prod(shape)
                shards.append(WrittenShard(rank, row, shape))
            row += shape[0] if shape else 0
        plan[name] = WrittenTensor(tensor.dtype, tuple(tensor.shape), tuple(shards))
    rank = dist.get_rank()
    own = [name for name, each in plan.items() if any(shard.rank == rank for shard in each.shards)]
    return TensorGroup(plan, {name: local_tensor(tensors[name].detach()) for name in own})


def planned(make: Callable[[], NamedTensors]) -> Callable[[], TensorGroup]:
    """Return what makes tensors in the checkpoint layout, and their plan."""
    return lambda: plan_group(make())


def holders_of(tensor: Tensor) -> list[list[int]]:
    """Return, for each shard of a tensor, the ranks that hold it: several where there are copies."""
    if not isinstance(tensor, DTensor):
        return [list(range(dist.get_world_size()))]
    ranks = tensor.device_mesh.mesh  # (shards,), or (copies, shards)
    return ranks.reshape(-1, ranks.shape[-1]).T.tolist()


def shard_shapes(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the shape of each shard; the last ones may have no rows, as `torch.chunk` cuts dim 0."""
    if not isinstance(tensor, DTensor):
        return [tuple(tensor.shape)]
    (rows, *rest), count = tensor.shape, tensor.device_mesh.mesh.shape[-1]
    most = -(-rows // count)
    return [(min(rows, (index + 1) * most) - min(rows, index * most), *rest) for index in range(count)]
