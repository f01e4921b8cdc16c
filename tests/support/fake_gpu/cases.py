"""Tiny configurations rehearsed in turn, and with defects planted: `python -m fake_gpu.cases FILE`."""

from __future__ import annotations

import cProfile
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.distributed.fsdp import fully_shard

import simpletuner
from fake_gpu.device import RUNTIME, Stream
from fake_gpu.rehearsal import Known, Rehearsal, rehearsed
from simpletuner.models.catalog.registry import load_preset
from simpletuner.models.tiny.build import build_preset
from simpletuner.parallel.fsdp2 import units_of
from simpletuner.parallel.model.blocks import recommended_blocks
from simpletuner.settings.values.shape import SampleShape, Shape

Flags = dict[str, Any]
TINY: Flags = {
    "model_family": "flux",
    "resolution": 512,  # so that activations are more than what the allocator rounds up
    "resolution_type": "pixel",
    "train_batch_size": 2,
    "gradient_checkpointing": False,
    "max_grad_norm": 2,
}
FSDP2: Flags = {"fsdp_enable": True}
LORA: Flags = {"model_type": "lora"}
RELEASED: Flags = {"optimizer_release_gradients": True, "max_grad_norm": 0, "use_ema": True}
VALIDATED: Flags = {"validation_prompt": "a", "validation_num_inference_steps": 3}
PROFILED = ("muon", "split", "activations", "lora")
"""Cases of which the functions that ran are noted: together they have those that all have, at a fifth of the time."""
RANKS = 8
CASES: dict[str, tuple[int, Flags]] = {
    "plain": (1, {"use_ema": True, "optimizer": "adam"}),
    "ddp": (RANKS, {"gradient_checkpointing": True}),
    "fsdp2": (RANKS, FSDP2 | VALIDATED | {"use_ema": True, "ema_device": "accelerator"}),
    "hsdp": (32, FSDP2 | {"dp_replicate_size": 4, "optimizer": "lion"}),
    "accumulated": (RANKS, FSDP2 | {"gradient_accumulation_steps": 2, "optimizer": "adagrad"}),
    "all-gather": (RANKS, FSDP2 | {"context_parallel_size": 2, "optimizer": "adafactor"}),
    "all-to-all": (RANKS, FSDP2 | {"context_parallel_size": 2, "context_parallel_comm_strategy": "alltoall"}),
    "muon": (RANKS, FSDP2 | {"optimizer": "muon", "use_ema": True, "ema_device": "accelerator"}),
    "schedule-free": (RANKS, FSDP2 | {"optimizer": "adamw_schedulefree"}),
    "split": (RANKS, FSDP2 | {"state_layout": "split", "use_ema": True}),
    "released": (RANKS, FSDP2 | RELEASED | {"activation_memory_budget": 0.5}),
    "unused": (RANKS, FSDP2),
    "stays-gathered": (RANKS, FSDP2 | {"fsdp_reshard_after_forward": False}),
    "offloaded": (RANKS, FSDP2 | {"fsdp_offload_params": True}),
    "activations": (1, {"offload_activations": True}),
    "lora": (1, LORA),
    "sharded-lora": (RANKS, FSDP2 | LORA),
    "int8": (1, LORA | {"base_model_precision": "int8"}),
    "float8": (1, {"float8": True}),
    "sound": (1, {"sound_loss_weight": 1, "tokenizer_max_length": 24}),
}
NEEDS_TORCHAO = ("int8", "float8")
SAVED, EVALUATED = ("plain", "lora", "offloaded"), ("fsdp2",)
UNUSED = "unused"
"""A case of Qwen-Image, some of whose weights are frozen, since its output does not depend on them."""
WITH_SOUND, FILM = "sound", SampleShape(Shape(17, 256, 256), has_first_frame=True, has_sound=True)
"""A case of LTX-2 on clips that have a first frame and sound."""
WHOLE = ("fsdp2", "all-gather", "all-to-all")
"""Cases with blocks of both kinds. The others have two of one kind, since their time is that of their operators."""
SAME_STREAMS = ("accumulated", "all-gather", "muon", "schedule-free", "split", "sound")
"""Cases that use no stream which "plain" does not, so that nothing of the order of streams is new in them."""


def rehearse_case(name: str, model: Flags, known: Known) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a step after a resume did, with saving and evaluations before it in some cases; then what it did with
    each defect planted."""
    world_size, flags = CASES[name]
    sample, checks_order = FILM if name == WITH_SOUND else None, name not in SAME_STREAMS
    with rehearsed(model | flags, world_size, known=known, checks_order=checks_order, sample=sample) as run:
        found = {}
        if name in (UNUSED, WITH_SOUND) or "activation_memory_budget" in flags:
            run.step()  # which copies tables of positions and keeps them, and shows what blocks could keep
        if name in SAVED:
            run.step()
            run.save()
        if name in EVALUATED:
            run.evaluate()
            found["evaluation"] = dict(run.recorder.waits)
        run.step()  # which must come behind all that is queued by then
        yield name, found | run.report() | {"ideal": ideal(run)}
        for defect, plant in DEFECTS.items() if name == WITH_DEFECTS else ():
            yield f"defect: {defect}", run_with_defect(run, plant)


def ideal(run: Rehearsal) -> dict[str, list[int]]:
    """Return number and bytes of what a layout has to communicate in a step, but for scalars and sequences."""
    settings, mesh = run.session.settings, run.session.mesh
    count = run.engine.num_parameters
    if settings.model.model_type == "lora":  # its units are gathered in several dtypes
        return {}
    if not settings.parallel.fsdp_enable:
        return {} if mesh.world.size == 1 else {"all-reduce float32 cuda": [1, 4 * count]}
    model = run.engine.module
    units = 1 + len(units_of(model, recommended_blocks(model), settings.parallel))
    passes = settings.training.gradient_accumulation_steps
    times = 2 if settings.parallel.fsdp_reshard_after_forward else 1
    gathered = sum(each.numel() for each in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    ideal = {
        "all-gather bfloat16 cuda": [times * units * passes, times * 2 * gathered * passes],
        "reduce-scatter float32 cuda": [units, 4 * trained],
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


DEFECTS: dict[str, Callable[[Rehearsal], AbstractContextManager[None]]] = {
    "reads": read_in_the_step,
    "stream": no_wait_for_stream,
    "cpu tensor": cpu_tensor_in_the_step,  # which ends the step
}
WITH_DEFECTS = "plain"
"""The case into whose later steps they are planted."""


def run_with_defect(run: Rehearsal, plant: Callable[[Rehearsal], AbstractContextManager[None]]) -> dict[str, Any]:
    assert run.recorder.order is not None
    run.recorder.order.races.clear()
    with plant(run), suppress(FakeTensorDeviceMismatchError):
        run.step()
        run.step()  # meets what the EMA of the first one left behind
    return run.report()


def rehearse_wrong_shards(model: Flags, known: Known) -> dict[str, Any]:
    """Return what a step did whose units are gathered twice, and whose largest weights are not sharded."""
    with (
        mock.patch("torch.distributed.fsdp.fully_shard", leave_out_a_weight),
        rehearsed(model | FSDP2, RANKS, known=known) as run,
        gathered_twice(run),
    ):
        run.step()
        return run.report() | {"ideal": ideal(run)}


def refuse_page_locking(model: Flags, known: Known) -> dict[str, Any]:
    """Return what a step did after the system has refused to lock memory for the EMA."""
    RUNTIME.code = 801  # cudaErrorNotSupported
    try:
        with rehearsed(model | {"use_ema": True}, resumes=False, known=known) as run:
            run.step()
            return run.report()
    finally:
        RUNTIME.code = 0


def rehearse_all(names: list[str], calls: cProfile.Profile) -> Iterator[tuple[str, dict[str, Any]]]:
    known = Known()
    skipped = NEEDS_TORCHAO if importlib.util.find_spec("torchao") is None else ()
    with (
        tiny_pipeline(num_layers=0) as small,
        tiny_pipeline() as whole,
        tiny_pipeline("qwen_image") as unused,
        tiny_pipeline("ltxvideo2", num_layers=1) as sounding,
    ):
        others = {UNUSED: unused, WITH_SOUND: sounding} | dict.fromkeys(WHOLE, whole)
        # What was imported is half a million objects, over which each collection would go.
        gc.collect()
        gc.freeze()
        for name in names or CASES:
            if name not in skipped:
                calls.enable() if name in PROFILED else calls.disable()
                yield from rehearse_case(name, others.get(name, small), known)
        if not names:
            yield "defect: shards", rehearse_wrong_shards(small, known)
            calls.enable()
            yield "refused", refuse_page_locking(small, known)


@contextmanager
def tiny_pipeline(family: str = "flux", **changes: int) -> Iterator[Flags]:
    """Yield the settings of a tiny pipeline; `changes` are of its denoiser's config."""
    preset = load_preset(family)
    assert preset is not None and preset.tiny is not None
    with TemporaryDirectory() as folder:
        build_preset(preset.tiny, transformer=changes).save_pretrained(folder)
        yield TINY | {"model_family": family, "pretrained_model_name_or_path": folder}


def main(file: Path, names: list[str]) -> None:
    found: dict[str, Any] = {}
    began, calls = time.process_time(), cProfile.Profile(subcalls=False, builtins=False)
    for name, each in rehearse_all(names, calls):
        found[name] = each | {"seconds": time.process_time() - began}
        file.write_text(json.dumps(found))
        began = time.process_time()
    calls.disable()
    file.write_text(json.dumps(found | {"called": called_functions(calls)}))


def called_functions(calls: cProfile.Profile) -> list[str]:
    """Return the functions of the package that this thread has called, as `parallel/gpu.py::describe_device`."""
    package = f"{Path(simpletuner.__file__).parent}/"
    places = [(each.code.co_filename, each.code.co_name) for each in calls.getstats() if not isinstance(each.code, str)]
    return sorted({f"{path.removeprefix(package)}::{name}" for path, name in places if path.startswith(package)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
