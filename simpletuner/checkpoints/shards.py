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
from torch.distributed.device_mesh import DeviceMesh
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
    # Once for a mesh and not for each tensor: DeviceMesh.mesh computes its ranks anew at 0.3 ms, before each save.
    holders_in = {mesh: holders_of(mesh) for mesh in set(map(mesh_of, tensors.values()))}
    # Largest first, so that the ranks' loads come out even; names break ties, so that all ranks agree.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].numel(), item[0])):
        holders = holders_in[mesh_of(tensor)]
        shapes = shard_shapes(tuple(tensor.shape), len(holders))
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


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the ranks over which a tensor is sharded; None for one that is whole on all of them."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def holders_of(mesh: DeviceMesh | None) -> list[list[int]]:
    """Return, for each shard of a tensor, the ranks that hold it: several where there are copies."""
    if mesh is None:
        return [list(range(dist.get_world_size()))]
    ranks = mesh.mesh  # (shards,), or (copies, shards)
    return ranks.reshape(-1, ranks.shape[-1]).T.tolist()


def shard_shapes(shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Return the shape of each of `count` shards; the last ones may have no rows, as `torch.chunk` cuts dim 0."""
    if count == 1:
        return [shape]
    rows, *rest = shape
    most = -(-rows // count)
    return [(min(rows, (index + 1) * most) - min(rows, index * most), *rest) for index in range(count)]
