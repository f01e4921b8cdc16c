"""What ranks hold between steps, engine by engine, beside what `plan` estimates; run by the fork server."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from engines import session_of, settings_of, write

from simpletuner.parallel.memory import estimate_torch, gradient_bytes
from simpletuner.parallel.world import joined_world
from simpletuner.training.engines import open_engine
from simpletuner.training.memory_estimate import memory_inputs
from simpletuner.training.workload import Workload


def living() -> int:
    """Return the bytes of all living tensors, each storage once."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [each.untyped_storage() for each in found if each.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_in_turn(arguments: dict[str, Any], names: list[str], report: str) -> None:
    """Write (held, estimated) bytes of one rank after a step, without gradients and with them."""
    with joined_world() as world:
        taken = {}
        for name in names:
            settings = settings_of(arguments, name, Path(arguments["folder"]), world.size)
            session, family = session_of(world, settings)
            trained = family.meta_denoiser  # held by the family
            before = living()
            engine = open_engine(session, family, None)
            for _ in range(2):  # the first one makes the moments
                for parameter in engine.module.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
                with_gradients = living() - before
                engine.set_learning_rate(1e-3)
                engine.step(2.0)
            workload = Workload(family, (64, 64))
            inputs = memory_inputs(settings, workload)
            estimate = estimate_torch(settings, inputs)
            held = sum(row.gpu + row.host for row in estimate.rows if row.name != "gathered")
            gradients = gradient_bytes(settings, inputs, True)
            taken[name] = [[living() - before, held], [with_gradients, held + gradients]]
            engine.close()
            del engine, trained
        write(taken, report, world)
