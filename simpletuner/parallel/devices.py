"""Data sheets of GPUs, and the bytes that a run keeps on each, in memory and on disk. No torch.

Arithmetic is dense bf16 with float32 accumulation; sheets with sparsity count half. P are the trained
parameters, N the ranks that share them. Activations are counted in counting/step_trace.py, and DeepSpeed's
bytes in counting/zero_memory.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

from simpletuner.errors import SettingsError
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.settings.declared.errors import nearest
from simpletuner.settings.declared.sections import Settings
from simpletuner.system.numbers import format_gib

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """`pattern` is a regular expression of the whole name that the driver gives; the same name may mean a
    slower card (H100 PCIe, H100 NVL, H200 NVL), which is not that device."""

    pattern: str
    peak_tflops: float
    memory_gib: float
    """Memory available to programs, as nvidia-smi shows it."""
    memory_gb_per_second: float
    link_gb_per_second: float
    """GB/s to the other GPUs of the machine, in one direction: NVLink, or PCIe without it."""

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)


def geforce(sms: int, boost_mhz: int) -> float:
    """TFLOP/s of dense bf16 with float32 accumulation: 512 FLOP per SM and clock.

    SMs and clocks are from the whitepapers of GA102, Ada and RTX Blackwell. This gives their "Peak FP16
    Tensor TFLOPS with FP32 Accumulate": 59.5 for a 3080, 71.2 for a 3090, 165.2 for a 4090, 209.5 for a 5090.
    """
    return round(sms * boost_mhz * 512e-6, 1)


# By the names that `simpletuner plan --gpu` takes. Links: 16 GB/s are PCIe 3.0 x16 or 4.0 x8, 32 PCIe 4.0
# x16, 64 PCIe 5.0 x16, and 448 the seven links of an MI300X. Of the 3060, 3080 and 4060 Ti there are others
# of the same name with 8, 12 and 8 GB: `--gpu_memory` says so.
DEVICES = {
    "H100": Device(r"NVIDIA H100 \d+GB HBM3", 989.5, 79.6, 3350, 450),
    "H200": Device(r"NVIDIA H200", 989.5, 139.8, 4800, 450),
    "B200": Device(r"NVIDIA B200", 2250.0, 179.1, 8000, 900),
    "A100-80GB": Device(r"NVIDIA A100.*80GB", 312.0, 79.3, 2039, 300),
    "A100-40GB": Device(r"NVIDIA A100.*40GB", 312.0, 39.4, 1555, 300),
    # Data sheets of NVIDIA: BF16 without sparsity ("125 | 250*" of an A10, "149.7 | 299.4*" of an A40);
    # memory less the ECC of GDDR6. A T4 has no bf16: its number is of fp16. Not compared with the sheets line
    # by line, which could not be opened: L40S, L4, A10, T4, A6000, 6000 Ada and PRO 6000.
    "L40S": Device(r"NVIDIA L40S", 362.0, 45.0, 864, 32),
    "L4": Device(r"NVIDIA L4", 121.0, 22.5, 300, 32),
    "A10": Device(r"NVIDIA A10", 125.0, 22.5, 600, 32),
    "A40": Device(r"NVIDIA A40", 149.7, 45.0, 696, 32),
    "T4": Device(r"Tesla T4", 65.0, 15.0, 320, 16),
    "RTX-3060": Device(r"NVIDIA GeForce RTX 3060", geforce(28, 1777), 12.0, 360, 32),
    "RTX-3070": Device(r"NVIDIA GeForce RTX 3070", geforce(46, 1725), 8.0, 448, 32),
    "RTX-3080": Device(r"NVIDIA GeForce RTX 3080", geforce(68, 1710), 10.0, 760, 32),
    "RTX-3090": Device(r"NVIDIA GeForce RTX 3090", geforce(82, 1695), 24.0, 936, 32),
    "RTX-4060-Ti": Device(r"NVIDIA GeForce RTX 4060 Ti", geforce(34, 2535), 16.0, 288, 16),
    "RTX-4070": Device(r"NVIDIA GeForce RTX 4070", geforce(46, 2475), 12.0, 504, 32),
    "RTX-4070-Ti": Device(r"NVIDIA GeForce RTX 4070 Ti", geforce(60, 2610), 12.0, 504, 32),
    "RTX-4080": Device(r"NVIDIA GeForce RTX 4080", geforce(76, 2505), 16.0, 717, 32),
    "RTX-4090": Device(r"NVIDIA GeForce RTX 4090", geforce(128, 2520), 24.0, 1008, 32),
    "RTX-5070": Device(r"NVIDIA GeForce RTX 5070", geforce(48, 2512), 11.9, 672, 64),
    "RTX-5070-Ti": Device(r"NVIDIA GeForce RTX 5070 Ti", geforce(70, 2452), 15.9, 896, 64),
    "RTX-5080": Device(r"NVIDIA GeForce RTX 5080", geforce(84, 2617), 15.9, 960, 64),
    "RTX-5090": Device(r"NVIDIA GeForce RTX 5090", geforce(170, 2407), 31.8, 1792, 64),
    "RTX-A6000": Device(r"NVIDIA RTX A6000", 154.8, 48.0, 768, 32),
    "RTX-6000-Ada": Device(r"NVIDIA RTX 6000 Ada Generation", 364.0, 48.0, 960, 32),
    # NVIDIA's whitepaper of the RTX PRO Blackwell; the Max-Q and the Server Edition have other clocks.
    "RTX-PRO-6000": Device(r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 95.6, 1792, 64),
    # Data sheets of AMD. Each of an MI250's two dies is a device: half of the sheet's 362.1 and 3,277, and
    # one link of 50 GB/s to another module. The driver gives an MI250X (383.0) the same name.
    "MI250": Device(r"AMD Instinct MI250.*", 181.0, 64.0, 1638, 50),
    "MI300X": Device(r"AMD Instinct MI300X.*", 1307.4, 192.0, 5300, 448),
    "MI325X": Device(r"AMD Instinct MI325X.*", 1307.4, 256.0, 6000, 448),
}


def device_by_driver_name(name: str) -> Device | None:
    """Return the device whose driver gives this name; None for one that is not in the table."""
    return next((device for device in DEVICES.values() if re.fullmatch(device.pattern, name)), None)


def device_by_name(name: str, otherwise: str = "") -> Device:
    """Return the device of a typed name, in any case. Raises SettingsError that names the nearest one.

    `otherwise` says what to do for a device that is not in the table.
    """
    known = {each.lower().replace("-", ""): each for each in DEVICES}
    if found := known.get(re.sub(r"[\s_-]", "", name.lower())):
        return DEVICES[found]
    raise SettingsError(
        f"--gpu = {name}: not in the table{nearest(name.upper(), DEVICES)}",
        "; ".join(filter(None, [f"known are {', '.join(DEVICES)}", otherwise])),
    )


FLOAT32_BYTES, BF16_BYTES = 4, 2

# A moment of state_layout=split: 8 bits, and a float32 scale for each 128 of them (`split_adamw.py`).
SPLIT_MOMENT_BYTES = 1 + 4 / 128

QUANTIZED_BYTES = {"int8": 1, "float8": 1, "nf4": 0.5 + 1 / 64}
"""Bytes of a frozen weight by base_model_precision: NF4 has 4 bits, and 8 bits of scale for 64 weights."""


@dataclass(frozen=True)
class MemoryInputs:
    """Numbers that decide the partitioning: parameters, ranks, machines, states per weight; and the device
    of the EMA."""

    num_parameters: int
    num_ranks: int
    num_machines: int = 1
    num_states: float = 2
    ema_device: Literal["", "cpu", "accelerator"] = ""
    """Empty without EMA."""
    frozen_parameters: int = 0
    """The base model of a LoRA."""
    num_weights: int = 0
    """Number of trained tensors; our own optimizers step each by itself."""
    unused_parameters: int = 0
    """Parameters without an effect on predictions, part of `num_parameters`: no gradients, no moments."""

    @classmethod
    def of(cls, settings: Settings, weights: TrainedWeights, frozen: int = 0) -> Self:
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
    """Share of a GPU's memory kept free for uses that an estimate does not count."""

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
