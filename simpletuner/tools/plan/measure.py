"""Measure steps on this machine in place of estimating them: random weights and inputs of the true shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from statistics import median

import torch
from torch import Tensor

from simpletuner.models.family.adapter import freeze
from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.compilation import compiler_explained
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.parallel.gpu import set_float32_precision
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.model.attention_backend import attention_by
from simpletuner.parallel.model.blocks import block_paths, recommended_blocks
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.parallel.world import World, joined_world
from simpletuner.settings import Settings
from simpletuner.training.auto.workload import Workload
from simpletuner.training.engines import build_engine
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
            if (adapter := family.adapter) is not None:
                freeze(model, dtype)
            optimizer = partial(make_optimizer, settings=settings.optimizer, blocks=block_paths(model))
            attach, plan = adapter and adapter.attach_new, family.sequence_plan
            engine = build_engine(model, blocks, settings, Mesh(world), fill, optimizer, attach, plan)
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
    latents = inputs.pop("latents").to(compute_dtype(settings))
    engine.set_learning_rate(settings.optimizer.learning_rate)
    timesteps = torch.full((len(latents),), 0.5, device=latents.device)
    for number in range(1, training.gradient_accumulation_steps + 1):
        with engine.micro_batch(number == training.gradient_accumulation_steps):
            prediction = family.predict(engine.model, latents, timesteps, inputs)
            engine.backward(prediction.float().square().mean() / training.gradient_accumulation_steps)
    return engine.step(settings.optimizer.max_grad_norm)
