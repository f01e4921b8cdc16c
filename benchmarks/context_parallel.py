"""What splitting a sequence saves, in what each rank keeps for backward at 1, 2 and 4 ranks per sample, and its speed.

A Flux of two blocks of each kind on 1,024 image and 128 text tokens, on gloo. Speed is that of 4 samples on 4 ranks,
beside 4 ranks that have one whole sample each.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from simpletuner.parallel.context.attention_exchange import SequenceGroup
from simpletuner.parallel.context.context_parallel import split_sequence

RANKS, ROUNDS, WIDTH, IMAGE, TEXT = 4, 7, 16, 1024, 128
CONFIG = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": WIDTH,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
CONTESTANTS = [("allgather", 1), ("allgather", 2), ("alltoall", 2), ("allgather", 4), ("alltoall", 4)]


def measure(rank: int, folder: str) -> None:
    """Run every contestant on this rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    models = [built(*contestant) for contestant in CONTESTANTS]
    kept = [kept_bytes(model, batch(1)) for model in models]
    # Each group of `size` ranks has `size` of the samples.
    batches = [batch(size) for _, size in CONTESTANTS]
    rounds = [[step_seconds(*each) for each in zip(models, batches, strict=True)] for _ in range(ROUNDS)]
    seconds = [statistics.median(each) for each in zip(*rounds, strict=True)]
    if rank == 0:
        for number, (strategy, size) in enumerate(CONTESTANTS):
            name = "whole sequences" if size == 1 else f"{strategy} over {size} ranks"
            memory = f"{kept[number] / 2**20:5.1f} MiB per sample ({kept[number] / kept[0]:.3f} of the whole)"
            speed = f"{seconds[number]:.3f} s for {RANKS} samples ({seconds[number] / seconds[0]:.2f} x)"
            print(f"{name:24} {memory}, {speed}")
    dist.barrier()
    dist.destroy_process_group()


def built(strategy: str, size: int) -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    from simpletuner.models.families.flux import Flux

    torch.manual_seed(0)
    model = FluxTransformer2DModel(**CONFIG)
    if size > 1:
        group, _ = dist.new_subgroups(size)
        assert isinstance(group, dist.ProcessGroup)
        assert Flux.sequence_plan is not None
        split_sequence(model, Flux.sequence_plan, SequenceGroup.of(group), strategy)
    return model


def batch(samples: int) -> dict[str, object]:
    return {
        "hidden_states": torch.randn(samples, IMAGE, CONFIG["in_channels"]),
        "encoder_hidden_states": torch.randn(samples, TEXT, CONFIG["joint_attention_dim"]),
        "pooled_projections": torch.randn(samples, CONFIG["pooled_projection_dim"]),
        "timestep": torch.full((samples,), 0.5),
        "img_ids": torch.zeros(IMAGE, 3),
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }


def kept_bytes(model: torch.nn.Module, inputs: dict[str, object]) -> int:
    """Return the bytes that autograd keeps between forward and backward; memory that tensors share counts once."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**inputs)[0].square().mean().backward()
    return sum(kept.values())


def step_seconds(model: torch.nn.Module, inputs: dict[str, object]) -> float:
    """Return the time of a forward and backward pass on the slowest rank, gradients left unreduced."""
    dist.barrier()
    began = time.perf_counter()
    model(**inputs)[0].square().mean().backward()
    dist.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as place:
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
        multiprocessing.spawn(measure, (str(Path(place)),), nprocs=RANKS)
