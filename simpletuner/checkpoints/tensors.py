"""Write and read named tensors as safetensors: one file per rank, or the files that other tools expect.

In memory a tensor of a checkpoint is whole (any shape, the same on all ranks), or a DTensor that is sharded by rows
over all ranks, or over those of each copy: Shard(0), so that rank r of k holds rows [r * ceil(n / k),
(r + 1) * ceil(n / k)) of the n rows of dim 0. Names are those of the denoiser's state_dict.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.world import World, lost_a_peer
from simpletuner.system.files import flush_to_disk, write_json

FILE_ERRORS = (OSError, SafetensorError, CheckpointException)


def write_sharded(folder: Path, tensors: NamedTensors) -> None:
    """Collective: write every rank's row shards into files of its own; a failure raises on all ranks."""
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def write_full(folder: Path, tensors: NamedTensors, world: World, stem: str) -> Callable[[], None]:
    """Collective: gather tensors one by one, each kept by one rank, and return what writes this rank's file.

    No rank ever holds more than its part of the whole and one gathered tensor. The files are what other tools open:
    `STEM.safetensors`, or several with an index. The returned function is not collective, so that it may fail on one
    rank while no other waits for it.
    """
    owners = assign_owners(tensors, world.size)
    owned: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if owners[name] == world.rank:
            owned[name] = whole.detach().to("cpu", copy=True).contiguous()
    files = file_names(stem, world.size)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if owned:
            safetensors.torch.save_file(owned, folder / files[world.rank], metadata={"format": "pt"})
            flush_to_disk(folder / files[world.rank])
        if world.is_first and world.size > 1:
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            weight_map = {name: files[owner] for name, owner in owners.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / f"{stem}.safetensors.index.json", index)

    return write


def assign_owners(tensors: NamedTensors, ranks: int) -> dict[str, int]:
    """Assign tensors to the ranks that write them, largest first to the rank with least, so that loads are equal."""
    loads = [0] * ranks
    owners = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].numel()):
        owner = loads.index(min(loads))
        owners[name] = owner
        loads[owner] += tensor.numel()
    return owners


def file_names(stem: str, count: int) -> list[str]:
    """Return the names that diffusers and transformers expect of one or several files."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def read_tensors(files: list[Path], tensors: NamedTensors, what: str) -> None:
    """Collective: fill tensors from files that any number of ranks wrote; each rank reads only its own rows.

    Raises EnvironmentNotReady that names `what` was read when a tensor is missing, has another shape, or a file is
    damaged.
    """
    with folder_with_only(files) as folder:
        try:
            dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
        except (*FILE_ERRORS, RuntimeError, ValueError, KeyError) as error:
            if lost_a_peer(error):
                raise  # the files are not at fault
            hint = "take another checkpoint with --resume_from_checkpoint, or check pretrained_model_name_or_path"
            raise EnvironmentNotReady(f"cannot read {what}: {error_line(error)}", hint) from None


def read_shapes(files: list[Path], what: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every whole tensor in files, by name. Raises EnvironmentNotReady for a damaged file."""
    if not files:
        return {}
    with folder_with_only(files) as folder:
        try:
            metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        except (*FILE_ERRORS, RuntimeError, ValueError, KeyError) as error:
            raise EnvironmentNotReady(f"cannot read {what}: {error_line(error)}") from None
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


def error_line(error: BaseException) -> str:
    """Return the first line of an error, of the first rank that failed where DCP collected several."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {error_line(cause)}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
