"""Every rank holds the whole model: one rank alone, or DDP, which averages gradients over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.torch_engine import MakeOptimizer, TorchEngine, autocast


def ddp_engine(
    model: nn.Module,
    mesh: Mesh,
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype,
    adapter: Mapping[str, nn.Parameter] | None = None,
    make_engine: Callable[..., TorchEngine] = TorchEngine,
) -> TorchEngine:
    """Return the engine of a whole model on every rank.

    Where weights that are trained are float32, autocast computes in `dtype`; bf16 weights compute without it.
    """
    trained = model.parameters() if adapter is None else adapter.values()
    in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in trained)
    parallel = None
    if mesh.dp_replicate > 1:
        # Views of DDP's buckets as gradients save a copy of all gradients. A frozen base, which all ranks have read
        # from the same files, need not be sent; in int8 it could not be.
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=adapter is None)
        if in_bf16:
            # a lambda, since DDP refuses annotations that are text, as all in this package
            parallel.register_comm_hook(None, lambda _, bucket: reduce_in_float32(bucket))

    def precision() -> torch.autocast:
        return autocast(mesh, torch.float32 if in_bf16 else dtype)

    @contextmanager
    def micro_batch(is_last: bool) -> Iterator[None]:
        # Gradients are averaged in the last micro batch: one all-reduce per step, not one for each.
        with parallel.no_sync() if parallel and not is_last else nullcontext(), precision():
            yield

    @contextmanager
    def inference() -> Iterator[None]:
        with precision():
            yield

    return make_engine(parallel or model, model, mesh, make_optimizer, micro_batch, inference, adapter)


def reduce_in_float32(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of bf16 gradients in float32, as FSDP2 does: in bf16 a sum loses what each rank adds."""
    exact = bucket.buffer().float().div_(dist.get_world_size())
    work = dist.all_reduce(exact, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: bucket.buffer().copy_(exact))
