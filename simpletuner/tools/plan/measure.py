"""Seconds of an optimizer step: from data sheets, or measured here with random weights of the true shapes.

An estimate adds up arithmetic, memory traffic and communication, at the share of a data sheet's figures that
`rates.py` knows; `simpletuner plan --measure` measures instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from simpletuner.counting.step_memory import Workload
from simpletuner.counting.step_trace import StepTrace
from simpletuner.data.prefetch import LATENTS
from simpletuner.models.family.adapter import freeze
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.streams import take_streams
from simpletuner.parallel.devices import FLOAT32_BYTES, Device, MemoryInputs, compute_bytes, shard_ranks
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.parallel.gpu import set_float32_precision
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.model.attention_backend import attention_by
from simpletuner.parallel.model.blocks import block_paths, recommended_blocks
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.parallelize import compiler_explained
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.parallel.world import World, joined_world
from simpletuner.settings import Settings
from simpletuner.tools.plan.rates import Rates
from simpletuner.training.build import build_engine
from simpletuner.training.optimizers import make_optimizer

# The first steps compile, allocate, and make the optimizer's state.
WARM_UP, STEPS = 2, 10


def measure_step(settings: Settings, workload: Workload) -> float:
    """Return the seconds of an optimizer step of one rank with the largest samples: the median of STEPS."""
    with random_engine(settings, workload.family) as (engine, world):
        inputs = random_inputs(settings, workload, world.device)
        steps = list(timed_steps(settings, workload.family, engine, inputs, WARM_UP + STEPS))
    return median(seconds for seconds, _ in steps[WARM_UP:])


def fill_with_noise(tensors: NamedTensors) -> None:
    for tensor in tensors.values():
        if tensor.is_floating_point():
            local_tensor(tensor).normal_(std=0.02)


@contextmanager
def random_engine(
    settings: Settings, family: ModelFamily, fill: Callable[[NamedTensors], None] = fill_with_noise
) -> Iterator[tuple[Engine, World]]:
    """Build the engine of these settings in a world of one; `fill` gives it its weights."""
    training, dtype = settings.training, compute_dtype(settings)
    with joined_world({}, settings.launch.use_cpu) as world, compiler_explained():
        set_float32_precision(training.allow_tf32)
        with attention_by(training.attention_backend, world.device, dtype, training.attention_kernel):
            model = family.denoiser()
            blocks = recommended_blocks(model)
            optimizer = partial(make_optimizer, settings=settings.optimizer, blocks=block_paths(model, blocks))
            if (adapter := family.adapter) is not None:
                freeze(model, dtype)
                adapter.attach_new(model)
            engine = build_engine(model, blocks, settings, Mesh(world), fill, optimizer, family.sequence_plan)
            with closing(engine):
                yield engine, world


def timed_steps(
    settings: Settings, family: ModelFamily, engine: Engine, inputs: Mapping[str, Tensor], count: int
) -> Iterator[tuple[float, float]]:
    """Take steps; yield the seconds and the gradient norm of each."""
    for _ in range(count):
        started = time.perf_counter()
        norm = take_step(settings, family, engine, dict(inputs)).item()  # waits for the device
        yield time.perf_counter() - started, norm


def random_inputs(settings: Settings, workload: Workload, device: torch.device) -> dict[str, Tensor]:
    samples, family = settings.training.train_batch_size, workload.family
    shapes = family.input_shapes(*workload.largest)
    return {
        name: (torch.ones(samples, *shape, dtype=torch.long) if "mask" in name else torch.randn(samples, *shape)).to(
            "cpu" if name in family.host_inputs else device
        )
        for name, shape in shapes.items()
    }


def take_step(settings: Settings, family: ModelFamily, engine: Engine, inputs: dict[str, Tensor]) -> Tensor:
    training = settings.training
    noised = {name: each.to(compute_dtype(settings)) for name, each in take_streams(inputs).items()}
    latents = noised[LATENTS]
    engine.set_learning_rate(settings.optimizer.learning_rate)
    timesteps = torch.full((len(latents),), 0.5, device=latents.device)
    for number in range(1, training.gradient_accumulation_steps + 1):
        with engine.micro_batch(number == training.gradient_accumulation_steps):
            prediction = family.predict_streams(engine.model, noised, timesteps, inputs)
            loss = torch.stack([each.float().square().mean() for each in prediction.values()]).sum()
            engine.backward(loss / training.gradient_accumulation_steps)
    return engine.step(settings.optimizer.max_grad_norm)


COMPILED_TRAFFIC, COMPILED_LAUNCHES = 0.28, 0.49
"""Shares of the traffic of pointwise operators, and of launches, that a compiler's fusion leaves."""

# Bytes moved per value by the optimizer of a state_layout: by its kernel, which reads gradients, weights and
# state once and writes the latter two, and 2 for the norm of the gradients.
KERNEL_BYTES = {"split": 16, "bf16": 12}

HOST_BYTES = 800
"""The same where weights are in the machine's memory, and torch's operators step them one after the other."""

# Between machines, for each GPU: 200 Gbit/s.
NETWORK_GB_PER_SECOND = 25.0


@dataclass(frozen=True)
class StepSeconds:
    """An optimizer step of one rank. Communication overlaps with computation."""

    products: float
    attention: float
    other: float
    communication: float
    offloading: float
    """Seconds to copy activations to the host and back, on the stream that computes."""
    optimizer: float

    @property
    def total(self) -> float:
        computing = self.products + self.attention + self.other + self.offloading
        return max(computing, self.communication) + self.optimizer


def estimate_step(
    settings: Settings, trace: StepTrace, device: Device, inputs: MemoryInputs, area: float, rates: Rates
) -> StepSeconds:
    """Estimate a step for samples of `area` times the traced size."""
    accumulation, cp = settings.training.gradient_accumulation_steps, settings.parallel.context_parallel_size
    passes, peak = accumulation * area / cp, device.peak_tflops * 1e12
    is_compiled = settings.compile.dynamo_backend == "inductor"
    traffic = trace.other_bytes * (COMPILED_TRAFFIC if is_compiled else 1.0)
    pointwise = passes * traffic / (device.memory_gb_per_second * 1e9 * rates.traffic)
    per_operator = COMPILED_LAUNCHES * rates.compiled_launch_seconds if is_compiled else rates.launch_seconds
    launches = accumulation * trace.launches * per_operator
    products = passes * trace.product_flops / (peak * rates.products)
    attention = passes * trace.attention_flops / (peak * rates.attention)
    return StepSeconds(
        products,
        attention,
        max(pointwise, launches - products - attention),
        communication_seconds(settings, device, inputs.num_parameters, rates),
        passes * 2 * trace.host_bytes / (rates.host_gb_per_second * 1e9),
        optimizer_seconds(settings, device, inputs, rates),
    )


def communication_seconds(settings: Settings, device: Device, parameters: int, rates: Rates) -> float:
    """Return the seconds in which a rank sends and receives what a step communicates."""
    several = settings.launch.num_machines > 1
    rate = min(device.link_gb_per_second, NETWORK_GB_PER_SECOND) if several else device.link_gb_per_second
    return communication_bytes(settings, parameters) / (rate * 1e9 * rates.link)


def communication_bytes(settings: Settings, parameters: int) -> float:
    """Return the bytes that a rank sends in a step. Sharded: weights, gathered twice, and gradients, reduced
    in float32; replicas: gradients alone, there and back."""
    ranks = settings.launch.num_processes
    is_sharded = settings.parallel.fsdp_enable or settings.parallel.zero_stage is not None
    reduced = FLOAT32_BYTES * (1 if is_sharded else 2)
    gathered = 2 * compute_bytes(settings) * settings.training.gradient_accumulation_steps if is_sharded else 0
    # In ring algorithms a rank sends all but its own share: (N - 1) / N of the bytes.
    return parameters * (reduced + gathered) * (1 - 1 / ranks)


def optimizer_seconds(settings: Settings, device: Device, inputs: MemoryInputs, rates: Rates) -> float:
    """Reading and writing weights, gradients and moments once, and gradients twice more for the norm."""
    share, layout = inputs.num_parameters / shard_ranks(settings), settings.optimizer.state_layout
    # Weight and moments are read and written, the gradient is read; 3: its norm reads it, clipping writes it.
    num_bytes = FLOAT32_BYTES * (2 + 2 * inputs.num_states + 1 + 3)
    if settings.parallel.fsdp_offload_params or settings.parallel.offload_optimizer != "none":
        moved = num_bytes if layout == "fp32" else HOST_BYTES
        return share * (moved + 2 * FLOAT32_BYTES) / (rates.host_gb_per_second * 1e9)
    # One kernel steps all weights, or each one in the backward pass.
    launches = inputs.num_weights if settings.optimizer.optimizer_release_gradients else 1
    seconds = share * KERNEL_BYTES.get(layout, num_bytes) / (device.memory_gb_per_second * 1e9 * rates.traffic)
    return seconds if layout == "fp32" else max(launches * rates.launch_seconds, seconds)
