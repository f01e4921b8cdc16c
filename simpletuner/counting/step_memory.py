"""Memory of the training phase, on each GPU and in the host's memory, row by row.

The denoiser and its largest samples are traced on fake tensors as the engine of the run would run them; what
FSDP2 gathers and reduces is added at each point of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from simpletuner.checkpoints.disk_usage import checkpoint_bytes
from simpletuner.counting.flops import use_cuda_kernels
from simpletuner.counting.operator_results import RememberingMode
from simpletuner.counting.step_counter import Execution, MetaMemory
from simpletuner.counting.step_trace import StepTrace, trace_step, trace_vae, with_fake_parameters
from simpletuner.counting.zero_memory import estimate_memory
from simpletuner.models.catalog.architecture import parameters_in
from simpletuner.models.family.adapter import freeze
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.vae import enable_parts
from simpletuner.models.folder.diffusers_io import build_on_meta
from simpletuner.models.folder.weights import any_weights_files
from simpletuner.parallel.devices import (
    FLOAT32_BYTES,
    MemoryEstimate,
    MemoryInputs,
    MemoryRow,
    compute_bytes,
    estimate_torch,
    frozen_bytes,
    gradient_bytes,
    place_row,
    shard_ranks,
)
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.fsdp2 import is_synced_each_batch, units_of
from simpletuner.parallel.model.activations import describe_activations, recompute_within
from simpletuner.parallel.model.blocks import count_parameters, recommended_blocks
from simpletuner.parallel.precision.split_engine import hold_in_bf16
from simpletuner.private_api.of_torch import FakeTensorMode
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Parallel
from simpletuner.settings.foreign.deepspeed_config import deepspeed_config
from simpletuner.settings.values.shape import SampleShape
from simpletuner.system.numbers import count_noun, format_gib

if TYPE_CHECKING:
    from simpletuner.counting.block_replay import EqualBlocks
    from simpletuner.counting.records import CountRecord

FORMULA = "the root, two units, and gradients of one in float32, at the peak"


@dataclass(frozen=True)
class Units:
    """Parameters of FSDP2's units by path, and of the root, which has all others."""

    sizes: dict[str, int]
    root: int

    @classmethod
    def of(cls, model: nn.Module, settings: Settings) -> Units:
        paths, sizes, seen = {module: path for path, module in model.named_modules()}, {}, set[nn.Parameter]()
        for unit in units_of(model, recommended_blocks(model), settings.parallel):  # innermost first
            own = set(unit.parameters()) - seen
            sizes[paths[unit]] = sum(each.numel() for each in own)
            seen |= own
        return cls(sizes, count_parameters(model) - sum(sizes.values()))

    def of_name(self, name: str) -> str:
        """Return the unit of a parameter; empty for the root."""
        while name and name not in self.sizes:
            name = name.rpartition(".")[0]
        return name


@dataclass
class Backward:
    """State of a backward pass over units: bytes by unit, of gathered weights and of float32 gradients."""

    units: Units
    weight_bytes: float
    gradient_bytes: float
    """Bytes per gradient value in its own precision; 0 where most values have none."""
    reduced_bytes: float
    reshards: bool
    """True where units are freed after their forward pass, and gathered again for the backward pass."""
    present: str = ""
    previous: str = ""
    done: dict[str, float] = field(default_factory=dict)
    """Bytes of gradients that are not reduced yet."""

    def enter(self, unit: str) -> None:
        if unit and unit != self.present:
            self.previous, self.present = self.present, unit
            self.done.pop(self.previous, None)

    def held(self, following: str) -> float:
        sizes = self.units.sizes
        units = sizes.get(self.present, 0) + sizes.get(following, 0) if self.reshards else sum(sizes.values())
        gathered = self.units.root + units
        return self.weight_bytes * gathered + sum(self.done.values()) + self.reduced_bytes * sizes.get(self.previous, 0)


def gathered_points(settings: Settings, units: Units, trace: StepTrace, numel: dict[str, int]) -> Iterator[float]:
    """Yield the bytes that FSDP2 adds at each of `trace.backward_points`: the root, the unit that computes
    and the next one, their gradients, and in float32 those of the unit before, which ranks are reducing.

    `numel` are the sizes of what is trained, by the names in the trace.
    """
    is_lora = settings.model.model_type == "lora"
    of = {name: units.of_name(name) for name in trace.released}
    order = [unit for unit in dict.fromkeys(of.values()) if unit]
    after = dict(pairwise(order))
    width = frozen_bytes(settings) if is_lora else compute_bytes(settings)
    gradients = (0, 0) if is_lora else (width, FLOAT32_BYTES)
    backward = Backward(units, width, *gradients, settings.parallel.fsdp_reshard_after_forward)
    for name in trace.released:
        backward.enter(of[name])
        following = after.get(backward.present, "") if backward.present else (order or [""])[0]
        yield backward.held(following)
        backward.done[of[name]] = backward.done.get(of[name], 0) + backward.gradient_bytes * numel[name]
    yield backward.held("")


@dataclass
class Workload:
    """A denoiser and its largest samples. Traces are made when they are asked for, once each."""

    family: ModelFamily
    largest: SampleShape
    interpolates: bool = False
    """Take large micro-batches from traces of 1 and 2 samples: for a search that asks for many."""
    mode: FakeTensorMode = field(default_factory=RememberingMode)
    models: dict[tuple[object, ...], tuple[nn.Module, EqualBlocks]] = field(default_factory=dict)
    traces: dict[tuple[object, ...], StepTrace] = field(default_factory=dict)
    vae_peaks: dict[tuple[object, ...], int] = field(default_factory=dict)
    numel: dict[str, int] = field(default_factory=dict)
    found_units: dict[tuple[object, ...], Units] = field(default_factory=dict)

    def trace(self, settings: Settings, samples: int, on_gpu: bool) -> StepTrace:
        """Return the trace of a micro-batch as an engine of these settings would run it.

        Compiled blocks with a budget are taken to lie between recomputing all and keeping all.
        """
        if self.interpolates and samples > 2:
            one, two = (self.trace(settings, count, on_gpu) for count in (1, 2))
            return one.scaled(samples, two)
        budget = settings.training.activation_memory_budget
        if budget is not None and settings.compile.is_on:
            recomputed, kept = (self.eager_trace(settings, samples, on_gpu, each) for each in (0.0, None))
            return recomputed.towards(kept, budget)
        if budget is None and settings.training.gradient_checkpointing:
            budget = 0.0
        return self.eager_trace(settings, samples, on_gpu, budget)

    def eager_trace(self, settings: Settings, samples: int, on_gpu: bool, budget: float | None) -> StepTrace:
        in_bf16, dtype = has_bf16_weights(settings), compute_dtype(settings)
        autocast = dtype != torch.float32 and not in_bf16
        copies = key_value_copies(settings.parallel)
        execution = Execution(dtype, autocast, on_gpu, settings.training.offload_activations, copies)
        key = (in_bf16, budget, execution, samples)
        if key not in self.traces:
            how = {**asdict(execution), "dtype": str(dtype), "in_bf16": in_bf16, "budget": budget}
            record = self.record("trace", shapes=self.shapes, samples=samples, how=how)
            count = partial(self.count_step, settings, samples, execution, budget)
            self.traces[key] = record.get(StepTrace.from_json, count, asdict)
        return self.traces[key]

    def count_step(self, settings: Settings, samples: int, execution: Execution, budget: float | None) -> StepTrace:
        from simpletuner.counting.block_replay import equal_blocks  # a start whose counts are kept does without

        kind = (has_bf16_weights(settings), execution.dtype, execution.on_gpu)
        if kind not in self.models:
            made = with_fake_parameters(self.trained_model(settings), self.mode)
            if execution.on_gpu:
                use_cuda_kernels(made)
            self.models[kind] = made, equal_blocks(made, self.family.unused_parameters())
        model, equal = self.models[kind]
        recompute_within(cast(Any, model), budget, MetaMemory("meta") if execution.offloads else None)
        return trace_step(self.family, model, self.mode, self.shapes, samples, execution, equal, bool(budget))

    def record(self, kind: str, **facts: Any) -> CountRecord:
        from simpletuner.counting.records import CountRecord  # not where a start has noted its bytes

        return CountRecord.of(self.family, kind, **facts)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.family.input_shapes(*self.largest)

    def trained_model(self, settings: Settings) -> nn.Module:
        model = self.family.denoiser()
        if self.family.adapter is not None:
            freeze(model, compute_dtype(settings))
            self.family.adapter.attach(model)
        elif has_bf16_weights(settings):
            hold_in_bf16(model)
        return model.train()

    @property
    def frozen_parameters(self) -> int:
        return 0 if self.family.adapter is None else self.denoiser_parameters

    @cached_property
    def denoiser_parameters(self) -> int:
        return count_parameters(self.family.meta_denoiser)

    def gathered(self, settings: Settings, trace: StepTrace) -> Iterator[float]:
        if not self.numel:  # by the names in a trace, whatever the dtypes are
            self.numel = {name: each.numel() for name, each in self.trained_model(settings).named_parameters()}
        return gathered_points(settings, self.units(settings), trace, self.numel)

    def units(self, settings: Settings) -> Units:
        """Return FSDP2's units, looked for once: `plan --auto` asks for those of hundreds of candidates."""
        chosen = settings.parallel
        key = (chosen.fsdp_auto_wrap_policy, chosen.fsdp_min_num_params, chosen.fsdp_transformer_layer_cls_to_wrap)
        if key not in self.found_units:
            self.found_units[key] = Units.of(self.family.meta_denoiser, settings)
        return self.found_units[key]

    @cached_property
    def buffer_bytes(self) -> int:
        return sum(each.nbytes for each in self.family.meta_denoiser.buffers())

    def text_encoder_bytes(self, settings: Settings) -> int | None:
        """Weights of all text encoders, in the dtype that they compute in; None without their files."""
        parts = ("text_encoder*", "connectors")  # the latter of LTX-2
        folders = [path for part in parts for path in self.family.folder.glob(part) if path.is_dir()]
        width = 2 if settings.training.mixed_precision == "bf16" else 4
        return width * sum(parameters_in(file) for each in folders for file in any_weights_files(each)) or None

    def vae_bytes(self, settings: Settings, samples: int, decodes: bool) -> int | None:
        """Return the most that the VAE takes for so many of the largest images; None without its config."""
        if "_class_name" not in self.family.vae_config:
            return None
        dtype = torch.bfloat16 if settings.model.vae_dtype == "bf16" else torch.float32
        largest = self.largest.target
        samples = 1 if largest.frames > 1 else samples  # clips are encoded one by one
        key = (dtype, samples, decodes)
        if key not in self.vae_peaks:
            how = {"dtype": str(dtype), "shape": largest, "samples": samples, "decodes": decodes}
            count = partial(self.count_vae, settings, dtype, samples, decodes)
            self.vae_peaks[key] = self.record("VAE", how=how).number(count)
        return self.vae_peaks[key]

    def count_vae(self, settings: Settings, dtype: torch.dtype, samples: int, decodes: bool) -> int:
        model = build_on_meta(self.family.vae_config).eval()
        enable_parts(model, settings.model)
        return trace_vae(model, dtype, self.largest.target, samples, decodes)


def has_bf16_weights(settings: Settings) -> bool:
    """True if the weights that compute are bf16 themselves, not float32 under autocast."""
    parallel = settings.parallel
    is_cast = parallel.fsdp_enable or parallel.zero_stage is not None or settings.optimizer.state_layout != "fp32"
    is_lora = settings.model.model_type == "lora"  # its matrices are float32, also over bf16 under FSDP2
    return settings.training.mixed_precision == "bf16" and is_cast and not is_lora


def key_value_copies(parallel: Parallel) -> int:
    # All-gather leaves each rank the keys and values of all.
    return parallel.context_parallel_size if parallel.context_parallel_comm_strategy == "allgather" else 1


# Of CUDA, kernels and the libraries' workspaces in each process: what nvidia-smi showed over what torch held
# in steps of SDXL, Qwen-Image and Wan on an H100 (767 to 769 MiB; 529 before the first step).
CONTEXT_BYTES = 770 * 2**20


def estimate_training(settings: Settings, workload: Workload) -> MemoryEstimate:
    """Estimate what training takes while the backward pass runs, where a step takes most."""
    trace = workload.trace(settings, settings.training.train_batch_size, not settings.launch.use_cpu)
    inputs = memory_inputs(settings, workload)
    gathered = [*workload.gathered(settings, trace)] if settings.parallel.fsdp_enable else []
    step = step_rows(settings, inputs, trace, gathered)
    return MemoryEstimate(inputs, (*state_rows(settings, inputs), *step, *other_rows(settings, workload, inputs)))


def estimate_without_step(settings: Settings, workload: Workload) -> MemoryEstimate:
    # Activations and gradients are known by a trace of a step alone.
    inputs = memory_inputs(settings, workload)
    return MemoryEstimate(inputs, (*state_rows(settings, inputs), *other_rows(settings, workload, inputs)))


def other_denoiser_row(num_bytes: float, on_gpu: bool) -> MemoryRow:
    """Row of the pipeline's denoiser that is not trained, which sampling needs (`two_denoisers.py`)."""
    place = "cpu" if on_gpu else "none"
    return place_row("other denoiser", place, num_bytes, "for validation; its blocks are on the GPU while they run")


def memory_inputs(settings: Settings, workload: Workload) -> MemoryInputs:
    return MemoryInputs.of(settings, workload.family.trained_weights, workload.frozen_parameters)


def state_rows(settings: Settings, inputs: MemoryInputs) -> tuple[MemoryRow, ...]:
    """Return weights, optimizer and EMA; of DeepSpeed also gradients of its optimizer step, and buffers."""
    if settings.parallel.zero_stage is not None:
        return estimate_memory(deepspeed_config(settings, inputs.num_ranks), inputs).rows
    return estimate_torch(settings, inputs).rows


def step_rows(
    settings: Settings, inputs: MemoryInputs, trace: StepTrace, gathered: Sequence[float]
) -> Iterator[MemoryRow]:
    """Yield what exists only at the peak of a backward pass; `gathered` has FSDP2's bytes at each point."""
    if settings.parallel.zero_stage is not None:
        # DeepSpeed's rows hold the gradients of its optimizer step, more than those of the backward pass.
        yield activations_row(settings, trace.peak_bytes(0), trace.host_bytes)
        return
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


def other_rows(settings: Settings, workload: Workload, inputs: MemoryInputs) -> Iterator[MemoryRow]:
    """Yield copies in the host's memory, CUDA's context, the model's buffers, and a frozen denoiser."""
    on_gpu = not settings.launch.use_cpu
    # Copies from which a thread writes or averages while the GPU computes.
    yield from host_rows(settings, inputs, checkpoint_bytes(settings, workload.family.trained_weights), on_gpu)
    if on_gpu:
        yield MemoryRow("CUDA", gpu=CONTEXT_BYTES, formula="context, kernels and libraries")
    if buffers := workload.buffer_bytes:
        yield MemoryRow("buffers", gpu=buffers, formula="of the model, such as tables of positions")
    if workload.family.other_denoiser and settings.validation.samples_images:
        yield other_denoiser_row(compute_bytes(settings) * workload.denoiser_parameters, on_gpu)


def host_rows(settings: Settings, inputs: MemoryInputs, checkpoint: int, on_gpu: bool) -> Iterator[MemoryRow]:
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
