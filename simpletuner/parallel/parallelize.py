"""Prepare a denoiser on the meta device for training: split the sequence, recompute, compile, shard, in this
order.

torch.compile works in place (`module.compile`), so parameter names do not change, as they would in a wrapper.
Without sharding every rank holds the whole model: one rank alone, or DDP, which averages gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from simpletuner.errors import TrainingError
from simpletuner.parallel.context.attention_exchange import SequenceGroup
from simpletuner.parallel.context.context_parallel import SequencePlan, split_sequence
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.fsdp2 import shard, units_by_class
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.model.activations import offload_activations, set_recomputation
from simpletuner.parallel.model.attention_backend import fuse_qkv
from simpletuner.parallel.torch_engine import MakeOptimizer, TorchEngine, autocast
from simpletuner.private_api import of_diffusers, of_torch
from simpletuner.settings.declared.sections import Compile, Parallel, Settings

RECOMPILE_LIMIT = 1024
"""Limit of torch's variants of a block: one per image size, block shape, and inference."""

LINES_OF_A_REASON, LETTERS_OF_A_REASON = 2, 300


def compile_in_place(model: nn.Module, blocks: tuple[str, ...], settings: Compile) -> None:
    """Compile the blocks, or the whole denoiser, at their first call; equal blocks share one compilation."""
    # Blocks of many widths that share a `forward` soon reach torch's default of 8, then run eager.
    of_torch.set_recompile_limit(RECOMPILE_LIMIT)
    # By block: equal blocks share one compilation (FLUX: 2 for 57), and FSDP2 gathers between them.
    for module in units_by_class(model, blocks) if settings.dynamo_use_regional_compilation else [model]:
        module.compile(
            backend=settings.dynamo_backend,
            mode=settings.dynamo_mode,
            fullgraph=settings.dynamo_fullgraph,
            dynamic=settings.dynamo_dynamic,
        )


@contextmanager
def compiler_explained() -> Iterator[None]:
    """Turn what the compiler raises, at a first call or a recompilation, into a TrainingError."""
    try:
        yield
    except of_torch.compiler_errors() as error:
        hint = "set dynamo_backend=no to train without the compiler; `--debug` shows all that it says"
        raise TrainingError(f"torch.compile failed: {reason(error)}", hint) from error


def reason(error: Exception) -> str:
    """Return the first lines of the compiler's report, which may have hundreds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:LINES_OF_A_REASON])[:LETTERS_OF_A_REASON] or type(error).__name__


def described(settings: Compile) -> str:
    mode = f" ({settings.dynamo_mode})" if settings.dynamo_mode != "default" else ""
    extent = "block by block" if settings.dynamo_use_regional_compilation else "as a whole"
    shapes = "once for all sizes" if settings.dynamo_dynamic else "once per size"
    return f"{settings.dynamo_backend}{mode}, {extent}, {shapes}{', full graphs' * settings.dynamo_fullgraph}"


def parallelize(
    model: nn.Module, blocks: tuple[str, ...], settings: Settings, mesh: Mesh, plan: SequencePlan | None = None
) -> None:
    """Apply what the settings ask for, in place; parameters stay on the meta device. Collective: creates
    groups.

    Compiling comes before sharding, so that FSDP2's hooks, which gather weights, run between the compiled
    blocks rather than break their graphs. DeepSpeed shards later, when it takes the model over.
    """
    model.train()
    if mesh.cp > 1 and plan is not None:
        group = SequenceGroup.of(mesh.cp_group())
        split_sequence(model, plan, group, settings.parallel.context_parallel_comm_strategy)
    if settings.training.fuse_qkv_projections:
        fuse_qkv(model)
    of_diffusers.keep_signatures(model)
    set_recomputation(model, settings)
    if settings.training.offload_activations:
        offload_activations(model)
    if settings.compile.is_on:
        compile_in_place(model, blocks, settings.compile)
    if settings.parallel.fsdp_enable:
        # The norms and matrices of a LoRA on a bf16 base are float32: gathered as is, under autocast.
        is_lora = settings.model.model_type == "lora"
        shard(model, blocks, settings.parallel, torch.float32 if is_lora else compute_dtype(settings), mesh)


def ddp_engine(
    model: nn.Module,
    _: Parallel,
    mesh: Mesh,
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype,
    adapter: Mapping[str, nn.Parameter] | None = None,
    make_engine: Callable[..., TorchEngine] = TorchEngine,
    skips_weights: bool = False,
) -> TorchEngine:
    """Return the engine of a whole model on every rank; `skips_weights` if not all steps train all weights.

    Where weights that are trained are float32, autocast computes in `dtype`; bf16 weights compute without it.
    """
    trained = model.parameters() if adapter is None else adapter.values()
    in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in trained)
    parallel = None
    if mesh.dp_replicate > 1:
        # Views of DDP's buckets as gradients save a copy of all gradients. A frozen base, which all ranks
        # have read from the same files, need not be sent; in int8 it could not be.
        parallel = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            init_sync=adapter is None,
            find_unused_parameters=skips_weights,
        )
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
    """Average a bucket of bf16 gradients in float32, as FSDP2 does: bf16 sums lose a rank's share."""
    exact = bucket.buffer().float().div_(dist.get_world_size())
    work = dist.all_reduce(exact, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: bucket.buffer().copy_(exact))
