"""Read named tensors from safetensors, written by any number of ranks, and plan the rows that each rank
writes.

In memory a tensor of a checkpoint is whole (any shape, the same on all ranks), or a DTensor sharded by rows
over all ranks, or over the ranks of each copy: Shard(0), so that rank r of k holds rows [r * ceil(n / k), (r
+ 1) * ceil(n / k)) of the n rows of dim 0. Names are those of the denoiser's state_dict. All ranks make the
same plan, without communication.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from simpletuner.errors import EnvironmentNotReady, is_out_of_memory, out_of_memory
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.parallel.world import lost_a_peer

FILE_ERRORS = (OSError, SafetensorError, CheckpointException)


def read_tensors(files: list[Path], tensors: NamedTensors, what: str) -> None:
    """Collective: fill tensors from files that any number of ranks wrote; each rank reads only its own rows.

    Raises EnvironmentNotReady that names `what` was read when a tensor is missing, has another shape, or a
    file is damaged.
    """
    with folder_with_only(files) as folder:
        try:
            load(dict(tensors), HuggingFaceStorageReader(str(folder)))
        except (*FILE_ERRORS, RuntimeError, ValueError, KeyError) as error:
            if lost_a_peer(error):
                raise  # the files are not at fault
            if is_out_of_memory(error):
                raise out_of_memory() from error
            hint = "take another checkpoint with --resume_from_checkpoint, or check pretrained_model_name_or_path"
            raise EnvironmentNotReady(f"cannot read {what}: {first_failure(error)[0]}", hint) from None


def load(tensors: dict[str, Tensor], reader: HuggingFaceStorageReader) -> None:
    """Collective: fill tensors, without exchanging plans where there is one rank.

    Gloo's thread would copy a plan of more than 32,768 bytes with an OpenMP team of its own, which makes
    training on a CPU twice as slow (see `reading_threads` in data/prefetch.py).
    """
    if dist.get_world_size() > 1:
        dcp.load(tensors, storage_reader=reader)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def read_shapes(files: list[Path], what: str) -> dict[str, tuple[int, ...]]:
    """Shape of every whole tensor in files, by name. Raises EnvironmentNotReady for a damaged file."""
    if not files:
        return {}
    with folder_with_only(files) as folder:
        try:
            metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        except (*FILE_ERRORS, RuntimeError, ValueError, KeyError) as error:
            if is_out_of_memory(error):
                raise out_of_memory() from error
            raise EnvironmentNotReady(f"cannot read {what}: {first_failure(error)[0]}") from None
    found = metadata.state_dict_metadata.items()
    return {name: tuple(each.size) for name, each in found if isinstance(each, TensorStorageMetadata)}


@contextmanager
def folder_with_only(files: list[Path]) -> Iterator[Path]:
    """Yield a folder that holds these files and no other safetensors: the reader takes folders, not files."""
    parent = files[0].parent
    if set(parent.glob("*.safetensors")) == set(files):
        yield parent
        return
    with tempfile.TemporaryDirectory(prefix="simpletuner-") as links:
        for file in files:
            (Path(links) / file.name).symlink_to(file.resolve())
        yield Path(links)


def first_failure(error: BaseException) -> tuple[str, BaseException]:
    """First line of an error and the error; where DCP collected several, of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        line, cause = first_failure(cause)
        return f"rank {rank}: {line}", cause
    return (str(error).strip() or type(error).__name__).splitlines()[0], error


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

    def shard_of(self, rank: int) -> WrittenShard:
        return next(shard for shard in self.shards if shard.rank == rank)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors saved together: `plan` is equal on all ranks, `local` has this rank's shards to write."""

    plan: Mapping[str, WrittenTensor]
    local: Mapping[str, Tensor]


def plan_group(tensors: NamedTensors) -> TensorGroup:
    """Choose the writer of each shard: the rank with the fewest elements among its holders."""
    loads = [0] * dist.get_world_size()
    plan: dict[str, WrittenTensor] = {}
    # Once per mesh, not per tensor: DeviceMesh.mesh recomputes its ranks in 0.3 ms, before each save.
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
    """Function that makes tensors in the checkpoint layout, and their plan."""
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
    """Shape of each of `count` shards; the last ones may have no rows, as `torch.chunk` cuts dim 0."""
    if count == 1:
        return [shape]
    rows, *rest = shape
    most = -(-rows // count)
    return [(min(rows, (index + 1) * most) - min(rows, index * most), *rest) for index in range(count)]
