"""What ranks measure about their own memory, run by the fork server."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engines import session_of
from malloc_info import allocated_bytes

from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.models.family.base import family_class
from simpletuner.models.folder.weights import weights_files
from simpletuner.parallel.engine import Engine
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.model.blocks import recommended_blocks
from simpletuner.parallel.precision import precision
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.parallel.world import World, joined_world
from simpletuner.settings.declared.sections import Launch, Lora, Model, Parallel, Settings, Training
from simpletuner.training.build import build_engine, open_engine
from simpletuner.training.optimizers import make_optimizer

QUANTIZED_AT_ONCE = 16 * 2**20
"""256 MiB in a run, which is more than the model of the test."""
BUCKET_BYTES = 8 * 2**20
"""DeepSpeed's default of 2 GB would hide all else."""


def sharded(family: str, folder: str, world: World) -> Engine:
    return built(family, folder, world, Parallel(fsdp_enable=True))


def whole(family: str, folder: str, world: World) -> Engine:
    return built(family, folder, world, Parallel())


def zero3(family: str, folder: str, world: World) -> Engine:
    config = {"zero_optimization": {"reduce_bucket_size": BUCKET_BYTES // 4}}
    return built(family, folder, world, Parallel(zero_stage=3, deepspeed_config=config))


def built(family: str, folder: str, world: World, parallel: Parallel) -> Engine:
    settings = Settings(
        model=Model(model_family=family, pretrained_model_name_or_path=folder),
        launch=Launch(num_processes=world.size),
        parallel=parallel,
        training=Training(mixed_precision="no", gradient_checkpointing=False),
    )
    opened = family_class(settings.model).open(Path(folder), settings)
    files = weights_files(Path(folder) / opened.denoiser_name)

    def load(tensors: dict[str, torch.Tensor]) -> None:
        read_tensors(files, tensors, folder)

    optimizer = partial(make_optimizer, settings=settings.optimizer)
    model = opened.denoiser()
    return build_engine(model, recommended_blocks(model), settings, build_mesh(settings, world), load, optimizer)


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def share_of_state(family: str, folder: str, report: str) -> None:
    """Take a step and write how many bytes of weights and moments this rank holds, and how many there are."""
    with joined_world() as world:
        engine = sharded(family, folder, world)
        for parameter in engine.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        engine.step(1.0)
        tensors = [*engine.module.parameters()]
        tensors += [t for make in engine.optimizer_state().tensors.values() for t in make().values()]
        held, whole = bytes_of([local_tensor(tensor) for tensor in tensors]), bytes_of(tensors)
        Path(f"{report}.{world.rank}").write_text(json.dumps([held, whole]))


def anonymous_bytes() -> int:
    """Return the memory of this process that is not pages of files, which the kernel can drop at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def use_small_pages() -> None:
    """Count what is used: a huge page (tests/conftest.py) is held whole from its first byte on. By prctl.h."""
    pr_set_thp_disable = 41
    assert ctypes.CDLL(None).prctl(pr_set_thp_disable, 1, 0, 0, 0) == 0


def peak_of_loading(family: str, folder: str, report: str) -> None:
    """Build and load a sharded model, and write by how much this rank's memory rose at most, and its share."""
    use_small_pages()
    with joined_world() as world:
        peaks = [anonymous_bytes()]
        with watching(lambda: peaks.append(anonymous_bytes())):
            engine = sharded(family, folder, world)
        before = peaks[0]
        parameters = list(engine.module.parameters())
        held, largest = bytes_of([local_tensor(p) for p in parameters]), max(bytes_of([p]) for p in parameters)
        Path(f"{report}.{world.rank}").write_text(json.dumps([max(peaks) - before, held, largest, os.getpid()]))


def peak_of_quantizing(small: str, folder: str, report: str) -> None:
    """Load the base of a LoRA in int8 under FSDP2, and write by how much this rank's memory rose at most, its share,
    how many weights are read at a time, and all of them in bf16; in bytes."""
    precision.GROUP_BYTES = QUANTIZED_AT_ONCE
    with joined_world() as world:
        open_quantized(small, world).close()  # imports what it needs
        peaks = [allocated_bytes()]
        with watching(lambda: peaks.append(allocated_bytes())):
            engine = open_quantized(folder, world)
        parameters = [*engine.module.parameters()]
        held = bytes_of([local_tensor(each.detach()) for each in parameters])
        whole = 2 * bytes_of(parameters)  # in int8, and the few that are not quantized
        Path(f"{report}.{world.rank}").write_text(json.dumps([max(peaks) - peaks[0], held, QUANTIZED_AT_ONCE, whole]))
        engine.close()


def open_quantized(folder: str, world: World) -> Engine:
    settings = Settings(
        model=Model(model_family="flux", pretrained_model_name_or_path=folder, model_type="lora"),
        lora=Lora(base_model_precision="int8"),
        launch=Launch(num_processes=world.size),
        parallel=Parallel(fsdp_enable=True),
        training=Training(mixed_precision="bf16", gradient_checkpointing=False),
    )
    session, family = session_of(world, settings)
    return open_engine(settings, session.mesh, family, None)


def memory_of_zero3(family: str, folder: str, report: str) -> None:
    """Build and load at stage 3, and train a step; write how many bytes more were allocated at most while it was built
    and were held afterwards, how many are this rank's share of the weights and all weights, and how many bytes of
    weights were whole here at most."""
    use_small_pages()
    with joined_world() as world:
        from simpletuner.deepspeed.startup import import_deepspeed

        import_deepspeed(world)
        allocated, held, peaks = allocated_bytes(), anonymous_bytes(), [0]
        with watching(lambda: peaks.append(allocated_bytes() - allocated)):
            engine = zero3(family, folder, world)
        held = anonymous_bytes() - held
        parameters = list(engine.module.parameters())
        gathered = [0]
        with watching(lambda: gathered.append(bytes_of(parameters))):
            loss = engine.model(**flux_inputs())[0].square().mean()
            engine.backward(loss)
        share = bytes_of([part for _, part in engine.local_shards()])
        Path(f"{report}.{world.rank}").write_text(
            json.dumps([max(peaks), held, share, 4 * engine.num_parameters, max(gathered)])
        )
        engine.close()


@contextmanager
def watching(look: Callable[[], None]) -> Iterator[None]:
    """Look every 5 ms, which is shorter than a block of weights stays whole."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def flux_inputs() -> dict[str, Any]:
    """Return a small picture and a short text."""
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    text = {"encoder_hidden_states": torch.randn(1, 8, 768), "pooled_projections": torch.randn(1, 768)}
    rest = {"timestep": torch.ones(1), "guidance": torch.ones(1), "return_dict": False}
    return {"hidden_states": torch.randn(1, 16, 64), **places, **text, **rest}
