"""From the slices that ZeRO keeps of a flattened parameter to the rows that checkpoints hold, and back.

Both cut a parameter into one contiguous interval per rank, in order of rank. So one all-to-all moves just what is
elsewhere, bit for bit, and nobody ever holds a whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Interval = tuple[int, int]
"""Which elements of a flattened parameter a rank has: from, and up to but without."""


def row_intervals(shape: Sequence[int], ranks: int) -> list[Interval]:
    """Return the elements behind each rank's rows, cut as `torch.chunk` cuts them; later ranks may have none."""
    rows, width = shape[0], prod(shape[1:])
    share = -(-rows // ranks)
    edges = [min(rank * share, rows) * width for rank in range(ranks + 1)]
    return list(pairwise(edges))


def overlap(one: Interval, other: Interval) -> int:
    """Return how many elements two intervals share."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def exchanged(part: Tensor, have: Sequence[Interval], want: Sequence[Interval], rank: int) -> Tensor:
    """Return this rank's wanted elements (1-D), given those that it has (1-D). All ranks take part.

    `have` and `want` say for every rank which elements those are.
    """
    received = part.new_empty(want[rank][1] - want[rank][0])
    if len(have) == 1:
        return received.copy_(part)
    sent, got = [overlap(have[rank], each) for each in want], [overlap(want[rank], each) for each in have]
    dist.all_to_all_single(received, part.contiguous(), got, sent)
    return received


class Rows:
    """The rows of every parameter over all ranks, as DTensors; `shapes` are those of the whole parameters."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes, self.ranks, self.rank = shapes, dist.get_world_size(), dist.get_rank()
        self.intervals = {name: row_intervals(shape, self.ranks) for name, shape in shapes.items()}
        self.meshes: dict[str, DeviceMesh] = {}

    def of(self, name: str, elements: Tensor) -> DTensor:
        """Return this rank's elements as its rows of a DTensor, in the same memory."""
        kind, shape = elements.device.type, self.shapes[name]
        if kind not in self.meshes:
            self.meshes[kind] = init_device_mesh(kind, (self.ranks,))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            elements.view(-1, *shape[1:]), self.meshes[kind], [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def empty(self, name: str, device: torch.device) -> DTensor:
        """Return float32 rows to be read into."""
        first, end = self.intervals[name][self.rank]
        return self.of(name, torch.empty(end - first, device=device))

    def whole(self, name: str, rows: DTensor, device: torch.device) -> Tensor:
        """Return a whole parameter on a device. All ranks take part."""
        share, shape = self.intervals[name][0][1], self.shapes[name]
        own = rows.to_local().flatten()
        part = torch.zeros(share, device=device)  # later ranks may have fewer rows
        part[: own.numel()] = own
        gathered = part.new_empty(self.ranks * share)
        dist.all_gather(list(gathered.chunk(self.ranks)), part)
        return gathered[: shape.numel()].view(shape)

    def from_part(self, name: str, part: Tensor, have: Sequence[Interval]) -> DTensor:
        """Return this rank's rows, given its slice; `have` are the slices of all ranks. All ranks take part."""
        return self.of(name, exchanged(part, have, self.intervals[name], self.rank))

    def to_part(self, name: str, rows: DTensor, want: Sequence[Interval]) -> Tensor:
        """Return this rank's slice, given its rows. All ranks take part."""
        return exchanged(rows.to_local().flatten(), self.intervals[name], want, self.rank)
