"""Read named tensors from safetensors, written by any number of ranks, and plan the rows that each rank
writes.

In memory a tensor of a checkpoint is whole (any shape, the same on all ranks), or a DTensor sharded by rows
over all ranks, or over the ranks of each copy: Shard(0), so that rank r of k holds rows [r * ceil(n / k), (r
+ 1) * ceil(n / k)) of the n rows of dim 0. Names are those of the denoiser's state_dict. All ranks make the
same plan, without communication.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from simpletuner.errors import EnvironmentNotReady, first_line, is_out_of_memory, out_of_memory
from simpletuner.parallel.mesh import mesh_of
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.torch_engine import local_tensor

FILE_ERRORS = (OSError, SafetensorError)
UNREADABLE = (*FILE_ERRORS, RuntimeError, ValueError, LookupError, TypeError)

# Metadata of a file of shards, as torch/distributed/checkpoint/_hf_utils.py (2.13) names it: JSON with the offsets of
# each tensor's shard in the whole tensor. torch's own reader of it takes 0.3 CPU s to import, and 0.1 to read with.
SHARDING_INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class StoredRows(NamedTuple):
    """Consecutive rows of a tensor in a file, from `row` on, or all of it."""

    file: Path
    row: int
    shape: tuple[int, ...]


def read_tensors(
    files: list[Path], tensors: NamedTensors, what: str, known: Mapping[str, list[StoredRows]] | None = None
) -> None:
    """Fill tensors from files that any number of ranks wrote; each rank reads only its own rows.

    `known` is what `stored_rows` has found in the files, for a caller that reads them in parts. Raises
    EnvironmentNotReady that names `what` was read when a tensor is missing, has another shape, or a file is
    damaged.
    """
    try:
        stored = stored_rows(files) if known is None else known
        pieces: dict[Path, list[tuple[str, StoredRows]]] = {}
        for name, tensor in tensors.items():
            check_shape(name, stored.get(name), tuple(tensor.shape))
            for piece in stored[name]:
                pieces.setdefault(piece.file, []).append((name, piece))
        for file, wanted in pieces.items():
            with safe_open(file, "pt") as opened:
                for name, piece in wanted:
                    copy_rows(opened, name, piece, tensors[name].detach())
    except UNREADABLE as error:
        if is_out_of_memory(error):
            raise out_of_memory() from error
        hint = "take another checkpoint with --resume_from_checkpoint, or check pretrained_model_name_or_path"
        raise EnvironmentNotReady(f"cannot read {what}: {first_line(error)}", hint) from None


def read_shapes(files: list[Path], what: str) -> dict[str, tuple[int, ...]]:
    """Shape of every whole tensor in files, by name. Raises EnvironmentNotReady for a damaged file."""
    try:
        return {name: stored_shape(pieces) for name, pieces in stored_rows(files).items()}
    except UNREADABLE as error:
        if is_out_of_memory(error):
            raise out_of_memory() from error
        raise EnvironmentNotReady(f"cannot read {what}: {first_line(error)}") from None


def stored_rows(files: Iterable[Path]) -> dict[str, list[StoredRows]]:
    """Rows of each tensor in files, whose metadata has the offsets of their shards, or whole tensors."""
    found: dict[str, list[StoredRows]] = {}
    for file in sorted(files):
        with safe_open(file, "pt") as opened:
            sharding = json.loads((opened.metadata() or {}).get(SHARDING_INFO, "{}"))
            for name in opened.keys():  # noqa: SIM118  an opened file is no dict
                offsets = sharding[name][OFFSETS] if sharding else []
                if any(offsets[1:]):
                    raise ValueError(f"{file.name} has a shard of {name} that is not cut by rows")
                shape = tuple(opened.get_slice(name).get_shape())
                found.setdefault(name, []).append(StoredRows(file, offsets[0] if offsets else 0, shape))
    return found


def stored_shape(pieces: Sequence[StoredRows]) -> tuple[int, ...]:
    return (max(each.row + each.shape[0] for each in pieces), *pieces[0].shape[1:]) if pieces[0].shape else ()


def check_shape(name: str, pieces: Sequence[StoredRows] | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless files have all rows of a tensor of this shape."""
    if pieces is None:
        raise ValueError(f"{name} is missing")
    if (found := stored_shape(pieces)) != shape:
        raise ValueError(f"{name} has the shape {list(found)}, not {list(shape)}")
    end = 0
    for piece in sorted(pieces, key=attrgetter("row")) if shape else ():
        if piece.row > end:
            break
        end = max(end, piece.row + piece.shape[0])
    if shape and end < shape[0]:
        raise ValueError(f"rows {end} and on of {name} are missing")


def copy_rows(opened: Any, name: str, piece: StoredRows, tensor: Tensor) -> None:
    local = local_tensor(tensor)
    if not piece.shape or local.shape == piece.shape == tensor.shape:
        local.copy_(opened.get_tensor(name))
        return
    own = first_row(tensor)
    begin, end = max(own, piece.row), min(own + len(local), piece.row + piece.shape[0])
    if begin < end:
        local[begin - own : end - own].copy_(opened.get_slice(name)[begin - piece.row : end - piece.row])


def first_row(tensor: Tensor) -> int:
    """The row of a tensor at which this rank's part of it begins."""
    if (mesh := mesh_of(tensor)) is None:
        return 0
    most = -(-len(tensor) // mesh.size(-1))  # as `torch.chunk` cuts dim 0
    return min(len(tensor), mesh.get_local_rank(-1) * most)


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
        return self.dtype.itemsize * sum(prod(shard.shape) for shard in self.shards if shard.rank == rank)


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """Tensors, the same on all ranks, and the shards that this rank writes; both in the order of a file."""

    tensors: Mapping[str, WrittenTensor]
    shards: Mapping[str, WrittenShard]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors saved together: `local` has this rank's shards, `block` their bytes if contiguous."""

    plan: GroupPlan
    local: Mapping[str, Tensor]
    block: Tensor | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the files of a full group, beside `format`."""


def plan_group(tensors: NamedTensors) -> TensorGroup:
    """Choose the writer of each shard: the rank with the fewest elements among its holders."""
    contents = tuple((name, each.dtype, tuple(each.shape), mesh_of(each)) for name, each in tensors.items())
    plan = plan_of(contents, dist.get_world_size(), dist.get_rank())
    return TensorGroup(plan, {name: local_tensor(tensors[name].detach()) for name in plan.shards})


class MadeWhenWritten(Mapping[str, Tensor]):
    """Tensors by name, each of which is made anew whenever it is asked for, so that one is in memory."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor]) -> None:
        self.names, self.make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> Tensor:
        return self.make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names  # Mapping's would make it


def streamed_group(
    shapes: NamedTensors, make: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> TensorGroup:
    """Plan a group for a world of one; `make` makes its tensors as written, `shapes` are on meta."""
    group = plan_group(shapes)
    return replace(group, local=MadeWhenWritten(group.plan.shards, make), metadata=metadata or {})


# Moments have the shapes of their weights, at each save: a plan takes 10 us of a tensor.
@lru_cache(maxsize=4)
def plan_of(
    contents: tuple[tuple[str, torch.dtype, tuple[int, ...], DeviceMesh | None], ...], ranks: int, rank: int
) -> GroupPlan:
    loads = [0] * ranks
    plan: dict[str, WrittenTensor] = {}
    # Once per mesh, not per tensor: DeviceMesh.mesh recomputes its ranks in 0.3 ms, before each save.
    holders_in = {mesh: holders_of(mesh) for mesh in {mesh for *_, mesh in contents}}
    # By element size, for alignment; largest first, so that the ranks' loads come out even; names break ties,
    # so that all ranks agree.
    for name, dtype, shape, mesh in sorted(contents, key=lambda each: (-each[1].itemsize, -prod(each[2]), each[0])):
        holders = holders_in[mesh]
        shapes = shard_shapes(shape, len(holders))
        shards, row = [], 0
        for holding, part in zip(holders, shapes, strict=True):
            if prod(part) or len(shapes) == 1:
                writer = min(holding, key=loads.__getitem__)
                loads[writer] += prod(part)
                shards.append(WrittenShard(writer, row, part))
            row += part[0] if part else 0
        plan[name] = WrittenTensor(dtype, shape, tuple(shards))
    return GroupPlan(plan, {name: shard for name, each in plan.items() for shard in each.shards if shard.rank == rank})


def planned(make: Callable[[], NamedTensors]) -> Callable[[], TensorGroup]:
    return lambda: plan_group(make())


def holders_of(mesh: DeviceMesh | None) -> list[list[int]]:
    """Return, for each shard of a tensor, the ranks that hold it: several where there are copies."""
    if mesh is None:
        return [list(range(dist.get_world_size()))]
    ranks = mesh.mesh  # (shards,), or (copies, shards)
    return ranks.reshape(-1, ranks.shape[-1]).T.tolist()


def shard_shapes(shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Shape of each of `count` shards; the last ones may have no rows, as `torch.chunk` cuts dim 0."""
    if count == 1:
        return [shape]
    rows, *rest = shape
    most = -(-rows // count)
    return [(min(rows, (index + 1) * most) - min(rows, index * most), *rest) for index in range(count)]
