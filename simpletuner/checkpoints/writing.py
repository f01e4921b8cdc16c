"""Write tensors as safetensors, each one as it arrives: no file is put together in memory.

A sharded group is one file per rank with the offsets of its shards, as torch's HuggingFaceStorageReader
expects them. A full group is what other tools open: `STEM.safetensors`, or several with an index.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, zip_longest
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from simpletuner.checkpoints.tensors import OFFSETS, SHARDING_INFO, GroupPlan, TensorGroup, WrittenShard, WrittenTensor
from simpletuner.models.folder.safetensors_dtypes import DTYPES
from simpletuner.parallel.world import World
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.checksums import write_with_checksum

NAMES = {dtype: name for name, dtype in DTYPES.items()}

Content = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor in a file."""


def write_sharded(folder: Path, group: TensorGroup, world: World) -> dict[str, str]:
    if not group.local:
        return {}
    name = f"shard-{world.rank + 1:05d}-model-00001-of-00001.safetensors"
    parts = map(as_bytes, group.local.values()) if group.block is None else (group.block,)
    return {name: write_safetensors(folder / name, sharded_header(group.plan), parts)}


@lru_cache(maxsize=4)
def sharded_header(plan: GroupPlan) -> bytes:
    # Moments share the plan of their weights, as do all saves.
    contents = {name: (plan.tensors[name].dtype, shard.shape) for name, shard in plan.shards.items()}
    offsets = {name: {OFFSETS: saved_offsets(shard)} for name, shard in plan.shards.items()}
    # As torch/distributed/checkpoint/_hf_utils.py (2.13) names files, and its version.
    return make_header(contents, {SHARDING_INFO: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"})


def saved_offsets(shard: WrittenShard) -> list[int]:
    """Offsets of a shard in its tensor, by dimension."""
    return [shard.row if dimension == 0 else 0 for dimension in range(len(shard.shape))]


def write_full(folder: Path, group: TensorGroup, world: World, stem: str) -> dict[str, str]:
    """Collective: write whole tensors, each rank its part of them, and return the checksums of its files by
    name.

    A rank holds no more than one gathered tensor. Raises on the rank that cannot write, after all have got
    their rows.
    """
    plan = group.plan.tensors
    owners = assign_owners(plan, world.size)
    files = file_names(stem, world.size)
    own = [name for name, owner in owners.items() if owner == world.rank]  # in the order of `gather_owned`
    contents = {name: (plan[name].dtype, plan[name].shape) for name in own}
    gathered, sums = gather_owned(group, owners, world), {}
    try:
        if contents:
            file = files[world.rank]
            sums[file] = write_safetensors(
                folder / file, make_header(contents, {"format": "pt", **group.metadata}), gathered
            )
        if world.is_first and world.size > 1:
            total = sum(each.dtype.itemsize * prod(each.shape) for each in plan.values())
            weight_map = {name: files[owners[name]] for name in sorted(owners)}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / f"{stem}.safetensors.index.json", index)
    finally:
        for _ in gathered:  # the other ranks wait for our rows, whatever happened to our file
            pass
    return sums


def assign_owners(plan: Mapping[str, WrittenTensor], ranks: int) -> dict[str, int]:
    """Choose the file of each tensor: of the rank with all of it, else of the one with the least."""
    loads, owners = [0] * ranks, {}
    for name, tensor in plan.items():
        shards = tensor.shards
        # A tensor that one rank has whole is written by it, and need not be sent.
        owners[name] = shards[0].rank if len(shards) == 1 else loads.index(min(loads))
        loads[owners[name]] += prod(tensor.shape)
    return owners


def file_names(stem: str, count: int) -> list[str]:
    """Return the names that diffusers and transformers expect of one or several files."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def gather_owned(group: TensorGroup, owners: Mapping[str, int], world: World) -> Iterator[Tensor]:
    """Collective: yield the bytes of the tensors that this rank owns, in the order of `owners`, as rows of
    one or more.

    In each round every rank receives one tensor at most, by one all-to-all where any of them is sharded.
    """
    queues: list[list[str]] = [[] for _ in range(world.size)]
    for name, owner in owners.items():
        queues[owner].append(name)
    for names in zip_longest(*queues):
        own = names[world.rank]
        if all(name is None or len(group.plan.tensors[name].shards) == 1 for name in names):
            if own is not None:
                yield as_bytes(group.local[own])
        else:
            yield from exchange_round(group, names, world)


def exchange_round(group: TensorGroup, names: Sequence[str | None], world: World) -> Iterator[Tensor]:
    """Collective: send this rank's rows of `names[r]` to rank r; yield the bytes of its own."""
    nothing = torch.empty(0, dtype=torch.uint8)
    sent = [as_bytes(group.local[name]) if name is not None and name in group.local else nothing for name in names]
    own = group.plan.tensors[name] if (name := names[world.rank]) is not None else None
    sizes = [own.bytes_from(rank) if own is not None else 0 for rank in range(world.size)]
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(sent), sizes, [part.numel() for part in sent], group=world.group)
    starts = list(pairwise(accumulate(sizes, initial=0)))
    for shard in own.shards if own is not None else ():
        yield received[slice(*starts[shard.rank])]


def as_bytes(tensor: Tensor) -> Tensor:
    # A tensor that is in host memory already is not copied.
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def write_safetensors(path: Path, header: bytes, parts: Iterable[Tensor]) -> str:
    """Write a file from `parts` (bytes, one tensor after the other), and return its checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_with_checksum(path, (part.numpy().data for part in parts), header)


def make_header(contents: Mapping[str, Content], metadata: Mapping[str, str]) -> bytes:
    """Bytes before the data: https://github.com/huggingface/safetensors#format."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in contents.items():
        begin, end = end, end + dtype.itemsize * prod(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text
