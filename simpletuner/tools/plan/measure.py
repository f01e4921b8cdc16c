"""Measure steps on this machine in place of estimating them: random weights and inputs of the true shapes."""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch
from torch import Tensor

from simpletuner.models.family import ModelFamily
from simpletuner.models.lora import freeze
from simpletuner.parallel.blocks import recommended_blocks
from simpletuner.parallel.engine import Engine, compute_dtype
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.optimizer_state import NamedTensors
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.parallel.world import joined_world
from simpletuner.settings import Settings
from simpletuner.tools.plan.workload import Workload
from simpletuner.training.engines import build_engine
from simpletuner.training.optimizers import make_optimizer

WARM_UP, STEPS = 2, 10


def measure_step(settings: Settings, workload: Workload) -> float:
    """Return the seconds of an optimizer step of one rank with the largest samples: the median of STEPS."""
    with joined_world({}, settings.launch.use_cpu) as world:
        engine = random_engine(settings, workload.family, Mesh(world))
        inputs = random_inputs(settings, workload, world.device)
        seconds = []
        for _ in range(WARM_UP + STEPS):
            started = time.perf_counter()
            take_step(settings, workload.family, engine, dict(inputs)).item()  # waits for the device
            seconds.append(time.perf_counter() - started)
        engine.close()
    return median(seconds[WARM_UP:])


def random_engine(settings: Settings, family: ModelFamily, mesh: Mesh) -> Engine:
    def fill(tensors: NamedTensors) -> None:
        for tensor in tensors.values():
            if tensor.is_floating_point():
                local_tensor(tensor).normal_(std=0.02)

    model = family.denoiser()
    blocks = recommended_blocks(model)
    if (adapter := family.adapter) is not None:
        freeze(model, compute_dtype(settings))
    optimizer = partial(make_optimizer, settings=settings.optimizer)
    return build_engine(
        model, blocks, settings, mesh, fill, optimizer, adapter and adapter.attach, family.sequence_plan
    )


def random_inputs(settings: Settings, workload: Workload, device: torch.device) -> dict[str, Tensor]:
    samples, family = settings.training.train_batch_size, workload.family
    shapes = family.input_shapes(workload.largest)
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
