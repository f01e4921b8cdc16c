"""Every rank holds the whole model: one rank alone, or DDP, which averages gradients over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.torch_engine import MakeOptimizer, TorchEngine


def ddp_engine(model: nn.Module, mesh: Mesh, make_optimizer: MakeOptimizer, dtype: torch.dtype) -> TorchEngine:
    """Return the engine of a whole model on every rank; autocast computes in bf16 over float32 weights."""
    # Views of DDP's buckets as gradients save a copy of all gradients.
    parallel = None if mesh.dp_replicate == 1 else DistributedDataParallel(model, gradient_as_bucket_view=True)

    def precision() -> torch.autocast:
        return torch.autocast(mesh.world.device.type, dtype, enabled=dtype != torch.float32)

    @contextmanager
    def micro_batch(is_last: bool) -> Iterator[None]:
        with parallel.no_sync() if parallel and not is_last else nullcontext(), precision():
            yield

    @contextmanager
    def inference() -> Iterator[None]:
        with precision():
            yield

    return TorchEngine(parallel or model, model, mesh, make_optimizer, micro_batch, inference)
