"""Every rank holds the whole model: one rank alone, or DDP, which averages gradients over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.torch_engine import MakeOptimizer, TorchEngine


def ddp_engine(
    model: nn.Module,
    mesh: Mesh,
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype,
    adapter: Mapping[str, nn.Parameter] | None = None,
) -> TorchEngine:
    """Return the engine of a whole model on every rank; autocast computes in bf16 over float32 weights."""
    parallel = None
    if mesh.dp_replicate > 1:
        # Views of DDP's buckets as gradients save a copy of all gradients. A frozen base, which all ranks have read
        # from the same files, need not be sent; in int8 it could not be.
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=adapter is None)

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

    return TorchEngine(parallel or model, model, mesh, make_optimizer, micro_batch, inference, adapter)
