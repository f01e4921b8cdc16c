"""Memory of the training phase, on each GPU and in the host's memory, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simpletuner.checkpoints.disk_usage import checkpoint_bytes
from simpletuner.deepspeed.estimate import estimate_memory
from simpletuner.models.analysis.step_trace import StepTrace
from simpletuner.parallel.devices.memory import (
    FLOAT32_BYTES,
    MemoryEstimate,
    MemoryInputs,
    MemoryRow,
    compute_bytes,
    estimate_torch,
    gradient_bytes,
    place_row,
    shard_ranks,
)
from simpletuner.parallel.fsdp2 import is_synced_each_batch
from simpletuner.parallel.model.activations import describe_activations
from simpletuner.settings import Settings
from simpletuner.settings.foreign.deepspeed.config import deepspeed_config
from simpletuner.system.numbers import count_noun, format_gib
from simpletuner.training.auto.gathered import FORMULA
from simpletuner.training.auto.workload import Workload

# Of CUDA and its libraries in each process; not measured.
CONTEXT_BYTES = 550 * 2**20


def estimate_training(settings: Settings, workload: Workload) -> MemoryEstimate:
    """Estimate what training takes while the backward pass runs, where a step takes most."""
    on_gpu = not settings.launch.use_cpu
    trace = workload.trace(settings, settings.training.train_batch_size, on_gpu)
    inputs, checkpoint = memory_inputs(settings, workload), checkpoint_bytes(settings, workload.weights)
    gathered = [*workload.gathered(settings, trace)] if settings.parallel.fsdp_enable else []
    rows = [*training_rows(settings, inputs, checkpoint, trace, gathered, on_gpu)]
    if buffers := sum(each.nbytes for each in workload.family.meta_denoiser.buffers()):
        rows.append(MemoryRow("buffers", gpu=buffers, formula="of the model, such as tables of positions"))
    if workload.family.other_denoiser and settings.validation.samples_images:
        rows.append(other_denoiser_row(compute_bytes(settings) * workload.denoiser_parameters, on_gpu))
    return MemoryEstimate(inputs, tuple(rows))


def other_denoiser_row(num_bytes: float, on_gpu: bool) -> MemoryRow:
    """Return the row of the pipeline's denoiser that is not trained, which sampling needs (`two_denoisers.py`)."""
    place = "cpu" if on_gpu else "none"
    return place_row("other denoiser", place, num_bytes, "for validation; its blocks are on the GPU while they run")


def memory_inputs(settings: Settings, workload: Workload) -> MemoryInputs:
    return MemoryInputs.of(settings, workload.weights, workload.frozen_parameters)


def training_rows(
    settings: Settings,
    inputs: MemoryInputs,
    checkpoint: int,
    trace: StepTrace,
    gathered: Sequence[float],
    on_gpu: bool,
) -> Iterator[MemoryRow]:
    """Yield what is there at the worst moment of a backward pass; `gathered` by FSDP2 at each point of it."""
    if settings.parallel.zero_stage is not None:
        # DeepSpeed's rows hold the gradients of its optimizer step, which are more than those of the backward pass.
        yield from estimate_memory(deepspeed_config(settings, inputs.num_ranks), inputs).rows
        yield activations_row(settings, trace.peak_bytes(0), trace.host_bytes)
    else:
        yield from estimate_torch(settings, inputs).rows
        is_synced = is_synced_each_batch(settings.parallel, inputs.num_parameters)
        whole = gradient_bytes(settings, inputs, is_synced)
        on_host = settings.parallel.fsdp_enable and settings.parallel.fsdp_offload_params
        # DDP's gradients are views of buckets that are there from the start.
        is_ddp = inputs.num_ranks > 1 and not settings.parallel.fsdp_enable
        are_kept = settings.training.gradient_accumulation_steps > 1 or is_ddp
        activations, gradients, units = trace.peak(0 if on_host else whole, are_kept, gathered)
        if gathered:
            yield MemoryRow("gathered", gpu=units, formula=FORMULA)
        formula = f"at the peak of the backward pass; {format_gib(whole)} at its end"
        yield MemoryRow("gradients", gpu=gradients, host=whole * on_host, formula=formula if whole else "released")
        yield activations_row(settings, activations, trace.host_bytes)
    # Copies from which a thread writes or averages while the GPU computes.
    yield from host_rows(settings, inputs, checkpoint, on_gpu)
    if on_gpu:
        yield MemoryRow("CUDA", gpu=CONTEXT_BYTES, formula="context and libraries, assumed")


def host_rows(settings: Settings, inputs: MemoryInputs, checkpoint: int, on_gpu: bool) -> Iterator[MemoryRow]:
    """Yield host-memory rows for copies of the weights (EMA, checkpoints)."""
    share = inputs.num_parameters / (inputs.num_ranks if settings.parallel.zero_stage else shard_ranks(settings))
    if on_gpu and inputs.ema_device == "cpu":
        yield MemoryRow("EMA's copy", host=FLOAT32_BYTES * share, formula="of the weights, page-locked")
    if settings.checkpoints.async_checkpointing:  # where it is not asked for, it depends on the memory that is free
        yield MemoryRow("checkpoint", host=checkpoint / inputs.num_ranks, formula="while it is written")


def activations_row(settings: Settings, peak: float, on_host: int) -> MemoryRow:
    """Return the row of activations; those that are offloaded are in the host's memory."""
    cp, training = settings.parallel.context_parallel_size, settings.training
    count = training.train_batch_size
    formula = f"{count_noun(count, 'sample')}, {describe_activations(settings)}"
    return MemoryRow("activations", gpu=peak / cp, host=on_host / cp, formula=formula)
