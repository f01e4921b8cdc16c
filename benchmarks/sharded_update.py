"""Time clipping and AdamW over FSDP2 shards: ours on plain local tensors, beside the same calls on DTensors."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from simpletuner.models.folder.diffusers_io import build_on_meta
from simpletuner.models.folder.malformed import read_json
from simpletuner.models.tiny.build import build_tiny
from simpletuner.parallel.fsdp2 import fsdp2_engine, shard
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.precision.precision import allocate
from simpletuner.parallel.world import joined_world
from simpletuner.settings.declared.sections import Model, Optimizer, Parallel
from simpletuner.training.optimizers import make_optimizer

ROUNDS = 30


def seconds_of(action: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def update_dtensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip and step as torch's own examples do."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    """Print medians of interleaved rounds and their ratio."""
    with tempfile.TemporaryDirectory() as folder, joined_world() as world:
        build_tiny(Model(model_family="sdxl"), Path(folder))
        model = build_on_meta(read_json(Path(folder) / "unet" / "config.json"))
        shard(model, ("BasicTransformerBlock", "ResnetBlock2D"), Parallel(), torch.float32, mesh := Mesh(world))
        allocate(model, world.device, world.device)
        engine = fsdp2_engine(model, Parallel(), mesh, partial(make_optimizer, settings=Optimizer()), torch.float32)
        dtensor_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        times: dict[str, list[float]] = {"DTensors": [], "ours": []}
        for parameter in model.parameters():
            parameter.data.zero_()
        for _ in range(ROUNDS):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            times["DTensors"].append(seconds_of(partial(update_dtensors, model, dtensor_optimizer)))
            times["ours"].append(seconds_of(partial(engine.step, 1.0)))
    medians = {name: statistics.median(values[3:]) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:10} {value * 1000:8.2f} ms")
    print(f"ratio      {medians['DTensors'] / medians['ours']:8.1f}")


if __name__ == "__main__":
    main()
