"""Read named tensors from safetensors, whichever ranks wrote them.

In memory a tensor of a checkpoint is whole (any shape, the same on all ranks), or a DTensor that is sharded by rows
over all ranks, or over those of each copy: Shard(0), so that rank r of k holds rows [r * ceil(n / k),
(r + 1) * ceil(n / k)) of the n rows of dim 0. Names are those of the denoiser's state_dict.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from simpletuner.errors import EnvironmentNotReady, is_out_of_memory, out_of_memory
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.world import lost_a_peer

FILE_ERRORS = (OSError, SafetensorError, CheckpointException)


def read_tensors(files: list[Path], tensors: NamedTensors, what: str) -> None:
    """Collective: fill tensors from files that any number of ranks wrote; each rank reads only its own rows.

    Raises EnvironmentNotReady that names `what` was read when a tensor is missing, has another shape, or a file is
    damaged.
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

    Gloo's thread would copy a plan of more than 32,768 bytes with an OpenMP team of its own, which makes training on a
    CPU twice as slow (see `reading_threads` in data/batches/prefetch.py).
    """
    if dist.get_world_size() > 1:
        dcp.load(tensors, storage_reader=reader)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def read_shapes(files: list[Path], what: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every whole tensor in files, by name. Raises EnvironmentNotReady for a damaged file."""
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
    """Return the first line of an error and the error; where DCP collected several, of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        line, cause = first_failure(cause)
        return f"rank {rank}: {line}", cause
    return (str(error).strip() or type(error).__name__).splitlines()[0], error
