"""Convert between DeepSpeed's optimizer partitions and the row shards that checkpoints hold.

An optimizer partition is any contiguous range of a flattened parameter, and may be empty. A row shard is what FSDP2
and checkpoints use: a DTensor sharded on dim 0. Both cut a flattened parameter into one contiguous range per rank, in
rank order, so a single all-to-all per parameter converts one into the other bit for bit, and no rank holds a whole
parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from simpletuner.parallel.mesh import Mesh


class ElementRange(NamedTuple):
    """The elements [start, end) of a flattened parameter."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start

    def count_shared(self, other: ElementRange) -> int:
        return max(0, min(self.end, other.end) - max(self.start, other.start))


def row_ranges(shape: Sequence[int], num_ranks: int) -> list[ElementRange]:
    """Return each rank's range when dim 0 is cut as `torch.chunk` cuts it; the last ranks may have no rows."""
    rows, row_numel = shape[0], prod(shape[1:])
    rows_per_rank = -(-rows // num_ranks)
    edges = [min(rank * rows_per_rank, rows) * row_numel for rank in range(num_ranks + 1)]
    return [ElementRange(start, end) for start, end in pairwise(edges)]


def exchange(elements: Tensor, have: Sequence[ElementRange], want: Sequence[ElementRange], rank: int) -> Tensor:
    """Collective: return the elements in `want[rank]` (1-D), given those in `have[rank]` (1-D).

    `have` and `want` list the range of every rank.
    """
    received = elements.new_empty(want[rank].numel)
    if len(have) == 1:
        return received.copy_(elements)
    send_sizes = [have[rank].count_shared(each) for each in want]
    receive_sizes = [want[rank].count_shared(each) for each in have]
    dist.all_to_all_single(received, elements.contiguous(), receive_sizes, send_sizes)
    return received


class RowShards:
    """Makes and converts row shards of parameters, given the shapes of the whole parameters by name."""

    def __init__(self, shapes: Mapping[str, torch.Size], mesh: Mesh) -> None:
        self.shapes, self.mesh, self.num_ranks, self.rank = shapes, mesh, mesh.world.size, mesh.world.rank
        self.ranges = {name: row_ranges(shape, self.num_ranks) for name, shape in shapes.items()}

    def empty(self, name: str, device: torch.device) -> DTensor:
        """Allocate this rank's rows (r, ...) in float32; r may be 0."""
        return self.as_dtensor(name, torch.empty(self.ranges[name][self.rank].numel, device=device))

    def as_dtensor(self, name: str, elements: Tensor) -> DTensor:
        """View this rank's elements (1-D) as its rows (r, ...) of a DTensor, without a copy."""
        shape, mesh = self.shapes[name], self.mesh.shard_mesh(elements.device.type)
        stride = torch.empty(shape, device="meta").stride()
        rows = elements.view(-1, *shape[1:])
        # run_check would compare shapes over all ranks, per parameter, and refuse ranks that have no rows
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def gather(self, name: str, rows: DTensor, device: torch.device) -> Tensor:
        """Collective: return the whole parameter on a device."""
        max_numel, shape = self.ranges[name][0].numel, self.shapes[name]
        local = rows.to_local().flatten()
        padded = torch.zeros(max_numel, device=device)  # all_gather wants equal sizes; the last ranks have fewer rows
        padded[: local.numel()] = local
        gathered = padded.new_empty(self.num_ranks * max_numel)
        dist.all_gather(list(gathered.chunk(self.num_ranks)), padded)
        return gathered[: shape.numel()].view(shape)

    def from_partition(self, name: str, partition: Tensor, have: Sequence[ElementRange]) -> DTensor:
        """Collective: convert this rank's partition (1-D) to its rows; `have` lists the partitions of all ranks."""
        return self.as_dtensor(name, exchange(partition, have, self.ranges[name], self.rank))

    def to_partition(self, name: str, rows: DTensor, want: Sequence[ElementRange]) -> Tensor:
        """Collective: convert this rank's rows to its partition (1-D); `want` lists the partitions of all ranks."""
        return exchange(rows.to_local().flatten(), self.ranges[name], want, self.rank)
