"""Bytes that a run keeps on each GPU, in memory and on disk, by what they are for. No torch.

P are the parameters that are trained, N the ranks that share them. Activations are counted elsewhere
(models/analysis/step_trace.py), and so are DeepSpeed's bytes (deepspeed/estimate.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from simpletuner.parallel.moments import TrainedWeights
from simpletuner.settings.declared.sections import Settings
from simpletuner.system.numbers import format_gib

FLOAT32_BYTES, BF16_BYTES = 4, 2

SPLIT_MOMENT_BYTES = 1 + 4 / 128
"""A moment of state_layout=split: 8 bits, and a float32 scale for each 128 of them (`split_state.py`)."""

QUANTIZED_BYTES = {"int8": 1, "float8": 1, "nf4": 0.5 + 1 / 64}
"""Bytes of a frozen weight by base_model_precision: NF4 has 4 bits, and 8 bits of scale for 64 weights."""


@dataclass(frozen=True)
class MemoryInputs:
    """Numbers that decide the partitioning: parameters, ranks, machines, states per weight; and the device of the
    EMA."""

    num_parameters: int
    num_ranks: int
    num_machines: int = 1
    num_states: float = 2
    ema_device: Literal["", "cpu", "accelerator"] = ""
    """Empty without EMA."""
    frozen_parameters: int = 0
    """The base model of a LoRA."""
    num_weights: int = 0
    """Tensors that are trained, each of which an optimizer of our own steps by itself."""
    unused_parameters: int = 0
    """Of `num_parameters`, those that no prediction depends on: they have neither gradients nor moments."""

    @classmethod
    def of(cls, settings: Settings, weights: TrainedWeights, frozen: int = 0) -> Self:
        """Combine settings with a model."""
        launch, ema = settings.launch, settings.ema
        states = weights.held_states(settings.optimizer.optimizer, shard_ranks(settings))
        ema_device = ema.ema_device if ema.use_ema else ""
        ranks, count = (launch.num_processes, launch.num_machines), len(weights.shapes)
        return cls(weights.num_parameters, *ranks, states, ema_device, frozen, count, weights.num_unused)

    @property
    def ranks_per_machine(self) -> int:
        return self.num_ranks // self.num_machines

    @property
    def parameters_per_rank(self) -> float:
        return self.num_parameters / self.num_ranks


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind that one rank keeps on its GPU, in memory and on disk, and the formula for them."""

    name: str
    gpu: float = 0
    host: float = 0
    disk: float = 0
    formula: str = ""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a configuration, by part."""

    inputs: MemoryInputs
    rows: tuple[MemoryRow, ...]

    @property
    def gpu_bytes(self) -> int:
        """Bytes on each GPU."""
        return round(sum(row.gpu for row in self.rows))

    @property
    def host_bytes(self) -> int:
        """Bytes in the memory of one machine, for all of its ranks."""
        return round(sum(row.host for row in self.rows) * self.inputs.ranks_per_machine)

    @property
    def disk_bytes(self) -> int:
        """Bytes in files of one machine, for all of its ranks."""
        return round(sum(row.disk for row in self.rows) * self.inputs.ranks_per_machine)


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of each GPU and of each machine; None where it is not known, which counts as enough."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    reserved_share: float = 0
    """Of each GPU, for what an estimate does not count."""

    def shortfall(self, gpu_bytes: float, host_bytes: float, phase: str = "") -> str:
        """Describe which resource is insufficient; empty if everything fits or capacity is unknown."""
        if self.gpu_bytes is not None and gpu_bytes > (1 - self.reserved_share) * self.gpu_bytes:
            return f"{format_gib(gpu_bytes)} per GPU" + (f" while {phase}" if phase else "")
        if self.host_bytes is not None and host_bytes > self.host_bytes:
            return f"{format_gib(host_bytes)} of memory per machine"
        return ""


def place_row(name: str, place: str, num_bytes: float, formula: str) -> MemoryRow:
    """Put bytes in the column of their place: `none` (GPU), `cpu` or `nvme`."""
    column = {"none": "gpu", "cpu": "host", "nvme": "disk"}[place]
    return MemoryRow(name, formula=formula, **{column: num_bytes})


def estimate_torch(settings: Settings, inputs: MemoryInputs) -> MemoryEstimate:
    """Estimate what DDP, FSDP2 or a single rank keeps between steps; `inputs.num_ranks` counts all ranks."""
    return MemoryEstimate(inputs, tuple(torch_rows(settings, inputs)))


def torch_rows(settings: Settings, inputs: MemoryInputs) -> Iterator[MemoryRow]:
    parallel, shards = settings.parallel, shard_ranks(settings)
    place = "cpu" if parallel.fsdp_enable and parallel.fsdp_offload_params else "none"
    share, divided = inputs.num_parameters / shards, " / N" if shards > 1 else ""
    layout = settings.optimizer.state_layout
    weight = BF16_BYTES if layout == "bf16" else FLOAT32_BYTES  # of which two are apart in `split`
    yield place_row("weights", place, weight * share, f"{weight} P{divided}")
    if inputs.frozen_parameters:
        width = frozen_bytes(settings)
        yield place_row("frozen base", place, width * inputs.frozen_parameters / shards, f"{width:.3g} F{divided}")
    state = inputs.num_states * (FLOAT32_BYTES if layout == "fp32" else SPLIT_MOMENT_BYTES)
    yield place_row("optimizer", place, state * share, f"{state:.3g} P{divided}")
    yield place_row(
        "EMA",
        "cpu" if inputs.ema_device == "cpu" or place == "cpu" else "none",
        FLOAT32_BYTES * share * bool(inputs.ema_device),
        f"4 P{divided}" if inputs.ema_device else "off",
    )


def shard_ranks(settings: Settings) -> int:
    """Return over how many ranks weights and moments are divided."""
    if not settings.parallel.fsdp_enable:
        return 1
    return settings.launch.num_processes // settings.parallel.dp_replicate_size


def compute_bytes(settings: Settings) -> int:
    return BF16_BYTES if settings.training.mixed_precision == "bf16" else FLOAT32_BYTES


def frozen_bytes(settings: Settings) -> float:
    """Return the bytes of each weight of a LoRA's base."""
    return QUANTIZED_BYTES.get(settings.lora.base_model_precision) or compute_bytes(settings)


def gradient_bytes(settings: Settings, inputs: MemoryInputs, syncs_each_batch: bool) -> float:
    """Return the bytes of all gradients on one rank when a step's last backward pass ends."""
    if settings.optimizer.optimizer_release_gradients:
        return 0  # each one lives until its weight is stepped, as the trace has it
    count = inputs.num_parameters - inputs.unused_parameters
    width = FLOAT32_BYTES if settings.optimizer.state_layout == "fp32" else BF16_BYTES
    accumulates = settings.training.gradient_accumulation_steps > 1
    if settings.parallel.fsdp_enable and accumulates and not syncs_each_batch:
        return FLOAT32_BYTES * count  # whole, until the last micro-batch reduces them
    return width * count / shard_ranks(settings)
