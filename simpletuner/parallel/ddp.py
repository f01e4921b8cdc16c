"""Every rank holds the whole model: one rank alone, or data-parallel with gradients averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from simpletuner.parallel.torch_engine import MakeOptimizer, TorchEngine
from simpletuner.parallel.world import World


def replicated(model: nn.Module, make_optimizer: MakeOptimizer, world: World, dtype: torch.dtype) -> TorchEngine:
    """Return the engine of a whole model on every rank; autocast computes in bf16 over float32 masters."""
    parallel = None if world.size == 1 else DistributedDataParallel(model, gradient_as_bucket_view=True)

    def precision() -> torch.autocast:
        """Return autocast, which does nothing in float32."""
        return torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32)

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        """Compute in the run's precision; keep gradients on this rank until the last micro-batch."""
        with parallel.no_sync() if parallel and not last else nullcontext(), precision():
            yield

    @contextmanager
    def inference() -> Iterator[None]:
        """Compute in the run's precision."""
        with precision():
            yield

    return TorchEngine(parallel or model, model, make_optimizer, micro_batch, inference)
