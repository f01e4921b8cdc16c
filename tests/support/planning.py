"""What ranks hold between steps, engine by engine, beside what `plan` estimates; run by the fork server."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from engines import opened, prepared_by, session_of, settings_of, write

from simpletuner.checkpoints.disk_usage import checkpoint_bytes
from simpletuner.counting.step_memory import Workload, memory_inputs
from simpletuner.parallel.devices import MemoryInputs, estimate_torch, gradient_bytes
from simpletuner.parallel.engine import Engine
from simpletuner.parallel.precision.split_adamw import QuantizedMoment
from simpletuner.parallel.world import joined_world
from simpletuner.settings.values.shape import SampleShape, Shape
from simpletuner.training.build import open_engine


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
            engine = open_engine(session.settings, session.mesh, family, None)
            for _ in range(2):  # the first one makes the moments
                for parameter in engine.module.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
                with_gradients = living() - before
                engine.set_learning_rate(1e-3)
                engine.step(2.0)
            workload = Workload(family, SampleShape(Shape(1, 64, 64)))
            inputs = memory_inputs(settings, workload)
            estimate = estimate_torch(settings, inputs)
            held = sum(row.gpu + row.host for row in estimate.rows if row.name != "gathered")
            gradients = gradient_bytes(settings, inputs, True)
            taken[name] = [[living() - before, held], [with_gradients, held + gradients]]
            engine.close()
            del engine, trained
        write(taken, report, world)


def moments_of(engine: Engine) -> int:
    """Return the bytes of an optimizer's moments, without those that are the parameters themselves."""
    states: Any = engine.optimizer.state  # pyright: ignore[reportAttributeAccessIssue]
    tensors = []
    for shard, state in states.items():
        for value in (value for name, value in state.items() if name != "step" and value is not None):
            parts = [value.codes, value.scales] if isinstance(value, QuantizedMoment) else [value]
            tensors += [part for part in parts if part.data_ptr() != shard.data_ptr()]
    return sum(tensor.nbytes for tensor in tensors)


def saved_in_turn(arguments: dict[str, Any], names: list[str], report: str) -> None:
    """Take a step and save; write, by engine, what was really taken, beside the estimate, by kind.

    `disk` is a checkpoint's bytes, `copies` those of its copies in the host's memory, and `moments` what this rank
    holds of them (not of DeepSpeed, see tests/zero/deepspeed/test_estimate.py).
    """
    with joined_world() as world:
        taken, prepared = {}, None
        for name in names:
            settings = settings_of(arguments, name, Path(arguments["folder"]) / name, world.size)
            prepared = prepared or prepared_by(world, settings)
            with opened(world, settings, prepared) as (trainer, state):
                weights, saver = trainer.family.trained_weights, trainer.checkpointer
                batch, _ = trainer.next_batch()
                trainer.train_step(batch)
                trainer.step = 1
                saver.save(trainer.step, batch.next_state)
                assert saver.background is not None
                copies = sum(buffer.block.nbytes for buffer in saver.background.copies.buffers.values())
                saver.wait()
                found = {"copies": [sum(map(int, world.gather_texts(str(copies)))), saver.size_bytes]}
                if settings.parallel.zero_stage is None:
                    rows = estimate_torch(settings, MemoryInputs.of(settings, weights)).rows
                    estimated = sum(row.gpu + row.host for row in rows if row.name == "optimizer")
                    found["moments"] = [moments_of(state.engine), estimated]
                saver.close()
            world.barrier()
            folder = settings.training.output_dir / "checkpoints"
            written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            taken[name] = {**found, "disk": [written, checkpoint_bytes(settings, weights)]}
        write(taken, report, world)
