"""Seconds of an optimizer step: arithmetic, memory traffic and communication over what a device can do of each.

The fractions are of the data sheet, from measurements of others that docs/plan.md names. None was measured with this
program: `simpletuner plan --measure` measures instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.models.analysis.step_trace import StepTrace
from simpletuner.parallel.devices.devices import Device
from simpletuner.parallel.devices.memory import FLOAT32_BYTES, MemoryInputs, compute_bytes, shard_ranks
from simpletuner.settings import Settings

PRODUCTS, ATTENTION, TRAFFIC, LINK = 0.71, 0.55, 0.8, 0.7
"""Achieved shares of a device's peak, by products and by attention, and of its memory's and its links' rate."""

COMPILED_TRAFFIC = 0.28
"""Share of pointwise operators' memory traffic that is left once a compiler has fused them."""

# Of one operator without compiler, on the host: what small samples cost at least.
LAUNCH_SECONDS = 6e-6

KERNEL_BYTES = {"split": 16, "bf16": 12}
"""Bytes moved per value by the optimizer of a state_layout: by its kernel, which reads gradients, weights and state
once and writes the latter two, and 2 for the norm of the gradients."""

HOST_BYTES = 800
"""The same where weights are in the machine's memory, and torch's operators step them one after the other."""

# Between machines, for each GPU: 200 Gbit/s.
NETWORK_GB_PER_SECOND = 25.0

HOST_GB_PER_SECOND = 25.0
"""Rate of PCIe to a GPU, and of the host's memory for one rank's optimizer."""


@dataclass(frozen=True)
class StepSeconds:
    """An optimizer step of one rank. Communication overlaps with computation."""

    products: float
    attention: float
    other: float
    communication: float
    offloading: float
    """Of activations, to the host and back, on the stream that computes."""
    optimizer: float

    @property
    def total(self) -> float:
        computing = self.products + self.attention + self.other + self.offloading
        return max(computing, self.communication) + self.optimizer


def estimate_step(
    settings: Settings, trace: StepTrace, device: Device, inputs: MemoryInputs, area: float
) -> StepSeconds:
    """Estimate a step whose samples have `area` of those that were traced."""
    accumulation, cp = settings.training.gradient_accumulation_steps, settings.parallel.context_parallel_size
    passes, peak = accumulation * area / cp, device.peak_tflops * 1e12
    is_compiled = settings.compile.dynamo_backend == "inductor"
    traffic = trace.other_bytes * (COMPILED_TRAFFIC if is_compiled else 1.0)
    pointwise = passes * traffic / (device.memory_gb_per_second * 1e9 * TRAFFIC)
    launches = 0.0 if is_compiled else accumulation * trace.launches * LAUNCH_SECONDS
    products = passes * trace.product_flops / (peak * PRODUCTS)
    attention = passes * trace.attention_flops / (peak * ATTENTION)
    return StepSeconds(
        products,
        attention,
        max(pointwise, launches - products - attention),
        communication_seconds(settings, device, inputs.num_parameters),
        passes * 2 * trace.host_bytes / (HOST_GB_PER_SECOND * 1e9),
        optimizer_seconds(settings, device, inputs),
    )


def communication_seconds(settings: Settings, device: Device, parameters: int) -> float:
    """Return the seconds in which a rank sends and receives what a step communicates."""
    several = settings.launch.num_machines > 1
    rate = min(device.link_gb_per_second, NETWORK_GB_PER_SECOND) if several else device.link_gb_per_second
    return communication_bytes(settings, parameters) / (rate * 1e9 * LINK)


def communication_bytes(settings: Settings, parameters: int) -> float:
    """Return what a rank sends in a step: weights, gathered twice, and gradients, reduced in float32; for replicas only
    the latter, there and back."""
    ranks = settings.launch.num_processes
    is_sharded = settings.parallel.fsdp_enable or settings.parallel.zero_stage is not None
    reduced = FLOAT32_BYTES * (1 if is_sharded else 2)
    gathered = 2 * compute_bytes(settings) * settings.training.gradient_accumulation_steps if is_sharded else 0
    # In ring algorithms a rank sends all but its own share: (N - 1) / N of the bytes.
    return parameters * (reduced + gathered) * (1 - 1 / ranks)


def optimizer_seconds(settings: Settings, device: Device, inputs: MemoryInputs) -> float:
    """Reading and writing weights, gradients and moments once, and the gradients twice more for their norm."""
    share, layout = inputs.num_parameters / shard_ranks(settings), settings.optimizer.state_layout
    # Weight and moments are read and written, the gradient is read; 3: its norm reads it, clipping writes it.
    num_bytes = FLOAT32_BYTES * (2 + 2 * inputs.num_states + 1 + 3)
    if settings.parallel.fsdp_offload_params or settings.parallel.offload_optimizer != "none":
        moved = num_bytes if layout == "fp32" else HOST_BYTES
        return share * (moved + 2 * FLOAT32_BYTES) / (HOST_GB_PER_SECOND * 1e9)
    moved, launches = KERNEL_BYTES.get(layout, num_bytes), inputs.num_weights * LAUNCH_SECONDS
    seconds = share * moved / (device.memory_gb_per_second * 1e9 * TRAFFIC)
    return seconds if layout == "fp32" else max(launches, seconds)
