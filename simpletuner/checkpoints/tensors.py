"""Write and read named tensors as safetensors: one file per rank, or one ordinary set; whole or sharded in memory."""

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

FILE_FAULTS = (OSError, SafetensorError, CheckpointException)


def write_sharded(folder: Path, tensors: NamedTensors) -> None:
    """Write every rank's shards into files of its own. All ranks take part; a failure raises on all of them."""
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def write_full(folder: Path, tensors: NamedTensors, world: World, stem: str) -> Callable[[], None]:
    """Gather tensors one by one, each kept by one rank, and return what writes this rank's file.

    No rank ever holds more than its part of the whole and one gathered tensor. The files are what other tools open:
    `STEM.safetensors`, or several with an index.
    """
    owners = balanced_owners(tensors, world.size)
    mine: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if owners[name] == world.rank:
            mine[name] = whole.detach().to("cpu", copy=True).contiguous()
    files = file_names(stem, world.size)

    def write() -> None:
        """Write this rank's part, and on the first rank the index."""
        folder.mkdir(parents=True, exist_ok=True)
        if mine:
            safetensors.torch.save_file(mine, folder / files[world.rank], metadata={"format": "pt"})
            flush_to_disk(folder / files[world.rank])
        if world.is_first and world.size > 1:
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            weight_map = {name: files[owner] for name, owner in owners.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / f"{stem}.safetensors.index.json", index)

    return write


def balanced_owners(tensors: NamedTensors, ranks: int) -> dict[str, int]:
    """Return which rank writes each tensor, so that all write about the same number of bytes."""
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
    """Fill tensors from files, whatever the number of ranks that wrote them; each rank reads only its own slices.

    Raises EnvironmentFault that names what was read when a tensor is missing, has another shape, or a file is damaged.
    """
    with folder_of(files) as folder:
        try:
            dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
        except (*FILE_FAULTS, RuntimeError, ValueError, KeyError) as error:
            if lost_a_peer(error):
                raise  # nothing is wrong with the files
            hint = "take another checkpoint with --resume_from_checkpoint, or check pretrained_model_name_or_path"
            raise EnvironmentNotReady(f"cannot read {what}: {reason(error)}", hint) from None


def shapes_in(files: list[Path], what: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every whole tensor in files, by name. Raises EnvironmentFault for a damaged file."""
    if not files:
        return {}
    with folder_of(files) as folder:
        try:
            metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        except (*FILE_FAULTS, RuntimeError, ValueError, KeyError) as error:
            raise EnvironmentNotReady(f"cannot read {what}: {reason(error)}") from None
    found = metadata.state_dict_metadata.items()
    return {name: tuple(each.size) for name, each in found if isinstance(each, TensorStorageMetadata)}


@contextmanager
def folder_of(files: list[Path]) -> Iterator[Path]:
    """Yield a folder that holds these files and no other safetensors, which the reader would read too."""
    parent = files[0].parent
    if set(parent.glob("*.safetensors")) == set(files):
        yield parent
        return
    with tempfile.TemporaryDirectory(prefix="simpletuner-") as links:
        for file in files:
            (Path(links) / file.name).symlink_to(file.resolve())
        yield Path(links)


def reason(error: BaseException) -> str:
    """Return one line that says why, from the rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {reason(cause)}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
