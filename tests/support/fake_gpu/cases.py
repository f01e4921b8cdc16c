"""Tiny configurations rehearsed in turn, and with defects planted: `python -m fake_gpu.cases FILE`."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.distributed.fsdp import fully_shard

from fake_gpu.device import RUNTIME, Stream
from fake_gpu.rehearsal import Rehearsal, Workloads, rehearsed
from simpletuner.parallel import fsdp2
from simpletuner.parallel.fsdp2 import units_of
from simpletuner.parallel.model.blocks import recommended_blocks

Flags = dict[str, Any]
TINY: Flags = {
    "model_family": "flux",
    "model_flavour": "tiny",
    "resolution": 512,  # so that activations are more than what the allocator rounds up
    "resolution_type": "pixel",
    "train_batch_size": 2,
    "gradient_checkpointing": False,
    "max_grad_norm": 2,
}
FSDP2: Flags = {"fsdp_enable": True}
LORA: Flags = {"model_type": "lora"}
RELEASED: Flags = {"optimizer_release_gradients": True, "max_grad_norm": 0, "use_ema": True}
CASES: dict[str, tuple[int, Flags]] = {
    "plain": (1, {"use_ema": True, "optimizer": "adam"}),
    "ddp": (8, {"gradient_checkpointing": True}),
    "fsdp2": (8, FSDP2 | {"use_ema": True, "ema_device": "accelerator"}),
    "hsdp": (32, FSDP2 | {"dp_replicate_size": 4, "optimizer": "lion"}),
    "accumulated": (8, FSDP2 | {"gradient_accumulation_steps": 2, "optimizer": "adagrad"}),
    "all-gather": (8, FSDP2 | {"context_parallel_size": 2, "optimizer": "adafactor"}),
    "all-to-all": (8, FSDP2 | {"context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall"}),
    "muon": (8, FSDP2 | {"optimizer": "muon"}),
    "schedule-free": (8, FSDP2 | {"optimizer": "adamw_schedulefree"}),
    "split": (8, FSDP2 | {"state_layout": "split", "use_ema": True}),
    "released": (8, FSDP2 | RELEASED),
    "offloaded": (8, FSDP2 | {"fsdp_offload_params": True}),
    "activations": (1, {"offload_activations": True}),
    "lora": (1, LORA),
    "int8": (1, LORA | {"base_model_precision": "int8"}),
    "float8": (1, {"float8": True}),
}
NEEDS_TORCHAO = ("int8", "float8")
SAVED, EVALUATED = ("plain", "lora", "offloaded"), ("fsdp2",)
OTHER_OPTIMIZERS = ("accumulated", "all-gather", "muon", "schedule-free", "split")
"""Cases whose optimizers use no stream of their own, so that nothing of the order of streams is new in them."""


def rehearse_case(name: str, known: Workloads) -> dict[str, Any]:
    """Return what a step after a resume did, with saving and evaluations before it in some cases."""
    world_size, flags = CASES[name]
    with rehearsed(TINY | flags, world_size, known=known, checks_order=name not in OTHER_OPTIMIZERS) as run:
        found = {}
        if name in SAVED:
            run.step()
            run.save()
        if name in EVALUATED:
            run.evaluate()
            found["evaluation"] = dict(run.recorder.waits)
        run.step()  # which must come behind all that is queued by then
        return found | run.report() | {"ideal": ideal(run)}


def ideal(run: Rehearsal) -> dict[str, list[int]]:
    """Return number and bytes of what a layout has to communicate in a step, but for scalars and sequences."""
    settings, mesh = run.session.settings, run.session.mesh
    count = run.engine.num_parameters
    if not settings.parallel.fsdp_enable:
        return {} if mesh.world.size == 1 else {"all-reduce float32 cuda": [1, 4 * count]}
    model = run.engine.module
    units = 1 + len(units_of(model, recommended_blocks(model), settings.parallel))
    passes = settings.training.gradient_accumulation_steps
    ideal = {
        "all-gather bfloat16 cuda": [2 * units * passes, 2 * 2 * count * passes],
        "reduce-scatter float32 cuda": [units, 4 * count],
    }
    if mesh.dp_replicate > 1:
        ideal["all-reduce float32 cuda"] = [units, 4 * count // (mesh.dp_shard * mesh.cp)]
    return ideal


@contextmanager
def read_in_the_step(run: Rehearsal) -> Iterator[None]:
    """Read from the device, copy from pageable memory, and copy to it while the device computes."""
    add_noise = run.trainer.objective.add_noise

    def planted(latents: Any, *arguments: Any) -> Any:
        latents.sum().item()
        latents.copy_(torch.zeros(latents.shape))
        return add_noise(latents, *arguments)

    with mock.patch.object(type(run.trainer.objective), "add_noise", lambda _, *arguments: planted(*arguments)):
        yield


@contextmanager
def cpu_tensor_in_the_step(run: Rehearsal) -> Iterator[None]:
    add_noise = run.trainer.objective.add_noise

    def planted(_: Any, latents: Any, *arguments: Any) -> Any:
        return add_noise(latents + torch.zeros(latents.shape), *arguments)

    with mock.patch.object(type(run.trainer.objective), "add_noise", planted):
        yield


@contextmanager
def no_wait_for_stream(_: Rehearsal) -> Iterator[None]:
    with mock.patch.object(Stream, "wait_stream", lambda *_: None):
        yield


@contextmanager
def gathered_twice(run: Rehearsal) -> Iterator[None]:
    block = units_of(run.engine.module, recommended_blocks(run.engine.module), run.session.settings.parallel)[0]

    def again(module: Any, *_: Any) -> None:
        module.reshard()
        module.unshard()

    hook = block.register_forward_pre_hook(again)
    yield
    hook.remove()


def leave_out_a_weight(module: Any, **options: Any) -> Any:
    """Shard a module but for its largest weight."""
    weights = [each for each in module.parameters() if not hasattr(each, "placements")]
    return fully_shard(module, **options, ignored_params={max(weights, key=torch.Tensor.numel)})


Defect = Callable[[Rehearsal], AbstractContextManager[None]]
DEFECTS: dict[str, tuple[int, Flags, Defect]] = {
    "reads": (1, {}, read_in_the_step),
    "cpu tensor": (1, {}, cpu_tensor_in_the_step),
    "stream": (1, {"use_ema": True}, no_wait_for_stream),
    "shards": (8, FSDP2, gathered_twice),
}


def rehearse_defect(name: str, known: Workloads) -> dict[str, Any]:
    """Return what a step did into which a defect was planted."""
    world_size, flags, plant = DEFECTS[name]
    shard = leave_out_a_weight if name == "shards" else fully_shard
    with (
        mock.patch.object(fsdp2, "fully_shard", shard),
        rehearsed(TINY | flags, world_size, known=known) as run,
        plant(run),
    ):
        with suppress(FakeTensorDeviceMismatchError):
            run.step()
            if run.trainer.ema is not None:
                run.step()
        return run.report() | {"ideal": ideal(run)}


def refuse_page_locking(known: Workloads) -> dict[str, Any]:
    """Return what a step did after the system has refused to lock memory for the EMA."""
    RUNTIME.code = 801  # cudaErrorNotSupported
    try:
        with rehearsed(TINY | {"use_ema": True}, known=known) as run:
            run.step()
            return run.report()
    finally:
        RUNTIME.code = 0


def main(file: Path, names: list[str]) -> None:
    known: Workloads = {}
    found: dict[str, Any] = {}
    skipped = NEEDS_TORCHAO if importlib.util.find_spec("torchao") is None else ()
    runs = {name: rehearse_case for name in CASES if name not in skipped}
    runs |= {f"defect: {name}": lambda name, known: rehearse_defect(name.partition(": ")[2], known) for name in DEFECTS}
    runs["refused"] = lambda _, known: refuse_page_locking(known)
    for name in names or runs:
        began = time.process_time()
        found[name] = runs[name](name, known) | {"seconds": time.process_time() - began}
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
