"""Memory of every phase, time and disk of one configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simpletuner.deepspeed.estimate import estimate_inputs, estimate_memory
from simpletuner.models.step_trace import StepTrace
from simpletuner.parallel.activations import describe_activations
from simpletuner.parallel.devices import Device
from simpletuner.parallel.fsdp2 import is_synced_each_batch
from simpletuner.parallel.memory import (
    FLOAT32_BYTES,
    MOMENTS,
    MemoryEstimate,
    MemoryInputs,
    MemoryRow,
    estimate_torch,
    gradient_bytes,
    shard_ranks,
)
from simpletuner.settings import Settings
from simpletuner.settings.deepspeed.config import deepspeed_config
from simpletuner.tools.plan.timing import StepSeconds, estimate_step
from simpletuner.tools.plan.workload import SampleSizes, Workload

CONTEXT_BYTES = 550 * 2**20
"""Of CUDA and its libraries in each process; not measured."""


@dataclass(frozen=True)
class Budget:
    """Memory of each GPU, and of each machine; None where it is not known."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True)
class RunPlan:
    """What one configuration takes."""

    settings: Settings
    memory: MemoryEstimate
    """While the backward pass runs, where a step takes most."""
    phases: dict[str, int | None]
    """The most bytes of a GPU in each phase; None where the files that say it are missing."""
    step_seconds: float | None
    """None without a device."""
    parts: StepSeconds | None
    """What `step_seconds` is made of, where it was estimated."""
    steps: int | None
    flops_per_sample: int
    checkpoint_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(filter(None, self.phases.values()))

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase] or 0)

    @property
    def samples_per_second(self) -> float | None:
        return self.step_seconds and self.settings.effective_batch_size / self.step_seconds

    def mfu(self, device: Device) -> float | None:
        """Return the FLOPs of the model over what all devices could have computed."""
        if self.samples_per_second is None:
            return None
        ranks = self.settings.launch.num_processes
        return self.samples_per_second * self.flops_per_sample / (ranks * device.peak_tflops * 1e12)

    def shortfall(self, budget: Budget) -> str:
        """Describe what is needed of which there is less; empty if all fits, or if nothing is known."""
        if budget.gpu_bytes is not None and self.peak_bytes > budget.gpu_bytes:
            return f"{self.peak_bytes / 2**30:,.1f} GiB per GPU while {self.peak_phase}"
        if budget.host_bytes is not None and self.memory.host_bytes > budget.host_bytes:
            return f"{self.memory.host_bytes / 2**30:,.1f} GiB of memory per machine"
        return ""


def estimate_run(
    settings: Settings, workload: Workload, sizes: SampleSizes, device: Device | None, flops_per_sample: int
) -> RunPlan:
    """Estimate a configuration; without a device memory alone."""
    on_gpu = not settings.launch.use_cpu
    trained, frozen = workload.trained_parameters
    trace = workload.trace(settings, settings.training.train_batch_size, on_gpu)
    inputs = memory_inputs(settings, workload, trained, frozen)
    memory = MemoryEstimate(inputs, tuple(training_rows(settings, inputs, trace, on_gpu)))
    at_rest = memory.gpu_bytes - sum(row.gpu for row in memory.rows if row.name in ("activations", "gradients"))
    phases = {
        "encoding captions": workload.text_encoder_bytes(settings),
        "encoding images": workload.vae_bytes(settings, settings.data.vae_batch_size, decodes=False),
        "training": memory.gpu_bytes,
    }
    if settings.validation.samples_images:
        decoding = workload.vae_bytes(settings, 1, decodes=True)
        phases["validating"] = decoding and round(at_rest) + decoding
    parts = estimate_step(settings, trace, device, trained, sizes.mean_area) if device else None
    size = checkpoint_bytes(settings, trained)
    return RunPlan(settings, memory, phases, parts and parts.total, parts, sizes.steps, flops_per_sample, size)


def memory_inputs(settings: Settings, workload: Workload, trained: int, frozen: int) -> MemoryInputs:
    largest, root = workload.units(settings) if settings.parallel.fsdp_enable else (0, 0)
    launch, ema = settings.launch, settings.ema
    return MemoryInputs(
        trained,
        launch.num_processes,
        launch.num_machines,
        MOMENTS[settings.optimizer.optimizer],
        ema.ema_device if ema.use_ema else "",
        frozen,
        largest,
        root,
    )


def training_rows(settings: Settings, inputs: MemoryInputs, trace: StepTrace, on_gpu: bool) -> Iterator[MemoryRow]:
    """Yield what is there at the worst moment of a backward pass."""
    if settings.parallel.zero_stage is not None:
        # DeepSpeed's rows hold the gradients of its optimizer step, which are more than those of the backward pass.
        zero_inputs = estimate_inputs(settings, inputs.num_parameters)
        yield from estimate_memory(deepspeed_config(settings, inputs.num_ranks), zero_inputs).rows
        yield activations_row(settings, trace.peak_bytes(0), trace.kept_bytes)
    else:
        yield from estimate_torch(settings, inputs).rows
        is_synced = is_synced_each_batch(settings.parallel, inputs.num_parameters)
        whole = gradient_bytes(settings, inputs, is_synced)
        on_host = settings.parallel.fsdp_enable and settings.parallel.fsdp_offload_params
        # DDP's gradients are views of buckets that are there from the start.
        is_ddp = inputs.num_ranks > 1 and not settings.parallel.fsdp_enable
        are_kept = settings.training.gradient_accumulation_steps > 1 or is_ddp
        activations, gradients = trace.peak(0 if on_host else whole, are_kept)
        yield MemoryRow("gradients", gpu=gradients, host=whole * on_host)
        yield activations_row(settings, activations, trace.kept_bytes)
    yield from host_rows(settings, inputs, on_gpu)
    if on_gpu:
        yield MemoryRow("CUDA", gpu=CONTEXT_BYTES, formula="context and libraries, assumed")


def host_rows(settings: Settings, inputs: MemoryInputs, on_gpu: bool) -> Iterator[MemoryRow]:
    """Yield what is held of weights a second time in the host's memory, to copy it without waiting."""
    share = inputs.num_parameters / (inputs.num_ranks if settings.parallel.zero_stage else shard_ranks(settings))
    if on_gpu and inputs.ema_device == "cpu":
        yield MemoryRow("EMA's copy", host=FLOAT32_BYTES * share, formula="of the weights, page-locked")
    if settings.checkpoints.async_checkpointing:  # where it is not asked for, it depends on the memory that is free
        copied = checkpoint_bytes(settings, inputs.num_parameters) / inputs.num_ranks
        yield MemoryRow("checkpoint", host=copied, formula="while it is written")


def checkpoint_bytes(settings: Settings, parameters: int) -> int:
    """Return the bytes of one checkpoint, over all ranks: weights, moments and EMA in float32."""
    return FLOAT32_BYTES * parameters * (1 + MOMENTS[settings.optimizer.optimizer] + settings.ema.use_ema)


def activations_row(settings: Settings, peak: float, kept: int) -> MemoryRow:
    """Return the row of activations; those that autograd keeps are in the host's memory if they are offloaded."""
    cp, training = settings.parallel.context_parallel_size, settings.training
    count, away = training.train_batch_size, kept * training.offload_activations
    formula = f"{count} sample{'s' * (count > 1)}, {describe_activations(settings)}"
    return MemoryRow("activations", gpu=max(0, peak - away) / cp, host=away / cp, formula=formula)
