"""Optimizer steps of models of their true size, with random weights and inputs; nothing is downloaded."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gpu.records import Record, tell

Flags = dict[str, Any]
MIB = 2**20
TRACE_BYTES = 7 * MIB
"""Largest trace that is kept: a device machine gives back files of 16 MiB, few in all."""


@dataclass(frozen=True)
class Step:
    """Steps of one engine."""

    flags: Flags
    warm_up: int = 2
    count: int = 3
    also: int | None = None
    """Another resolution for the same engine."""
    frames: int = 1
    is_traced: bool = False
    has_peer: bool = False
    """Beside it, the same step as diffusers' training script takes it."""

    def flags_here(self, tiny: bool) -> Flags:
        if not tiny:
            return self.flags
        slow = {"float8", "activation_memory_budget", "dynamo_backend"}  # a compiler takes a CPU 15 s per case
        kept = {name: value for name, value in self.flags.items() if name not in slow}
        small = {"model_flavour": "tiny", "resolution": 64, "tokenizer_max_length": 16, "lora_rank": 4, "use_cpu": True}
        return kept | small | {"dynamo_backend": "no"}

    def resolutions(self, tiny: bool) -> list[int]:
        return [self.flags_here(tiny)["resolution"], *([self.also] if self.also and not tiny else [])]


LORA: Flags = {"model_type": "lora", "lora_rank": 16}
FSDP: Flags = {"fsdp_enable": True}
RECOMPUTED: Flags = {"gradient_checkpointing": True}
KEPT: Flags = {"gradient_checkpointing": False}
COMPILED: Flags = {"dynamo_backend": "inductor"}
SPLIT: Flags = {"state_layout": "split"}
SINGLE: Flags = {"train_batch_size": 1}
PIXELS: Flags = {"resolution": 1024, "resolution_type": "pixel", "dynamo_backend": "no"}
FLUX: Flags = PIXELS | {"model_family": "flux", "model_flavour": "dev"}
SDXL: Flags = PIXELS | {"model_family": "sdxl", "model_flavour": "base-1.0", "train_batch_size": 8}
SDXL_LOKR: Flags = SDXL | LORA | KEPT | {"lora_type": "lokr", "lokr_factor": 16}
SD3: Flags = PIXELS | {"model_family": "sd3", "model_flavour": "medium"}
Z_IMAGE: Flags = PIXELS | {"model_family": "z_image", "model_flavour": "base", "resolution": 512}
QWEN: Flags = PIXELS | {"model_family": "qwen_image", "model_flavour": "v1.0"}
WAN: Flags = PIXELS | {"model_family": "wan", "model_flavour": "t2v-480p-14b-2.1", "resolution": 480}
FLUX_LORA = FLUX | LORA | RECOMPUTED | SINGLE
STREAMED: Flags = SDXL | RECOMPUTED | FSDP | {"fsdp_offload_params": True}
RELEASED: Flags = {"state_layout": "bf16", "optimizer_release_gradients": True, "max_grad_norm": 0}


def flux_compiled(samples: int, budget: float, **more: object) -> Step:
    """Steps of eight samples of FLUX.1-dev in full, compiled, in micro-batches of so many."""
    batch = {"train_batch_size": samples, "gradient_accumulation_steps": 8 // samples}
    return Step(FLUX | SPLIT | COMPILED | KEPT | batch | {"activation_memory_budget": budget, **more})


LEVERS: dict[str, Step] = {
    "flux full, compiled, 8x1": flux_compiled(8, 0.1),
    "flux full, compiled, 4x2": flux_compiled(4, 0.3),
    "flux full, compiled, 1x8": flux_compiled(1, 1.0),
    "flux full, compiled, fused projections": flux_compiled(2, 0.6, fuse_qkv_projections=True),
    "flux full, compiled, flash attention": flux_compiled(2, 0.6, attention_backend="flash"),
    "flux full, compiled, offloaded": flux_compiled(4, 0.6, offload_activations=True),
}
"""What a full step of FLUX.1-dev gains by each of its settings."""

STEPS: dict[str, Step] = {
    "flux full": Step(FLUX | RECOMPUTED | SPLIT | {"train_batch_size": 8}, is_traced=True),
    "flux full, 80 GB": Step(FLUX | RECOMPUTED | RELEASED | {"train_batch_size": 8}, is_traced=True),
    "flux full, compiled": Step(flux_compiled(2, 0.6).flags, is_traced=True),
    "flux lora": Step(FLUX_LORA, count=5, is_traced=True, has_peer=True),
    "flux lora int8": Step(FLUX_LORA | {"base_model_precision": "int8"}, count=4),
    "flux lora int8 products": Step(
        FLUX_LORA | {"base_model_precision": "int8", "base_model_compute": "int8"}, count=4
    ),
    "flux lora nf4": Step(FLUX_LORA | {"base_model_precision": "nf4"}, count=4),
    "flux lora float8": Step(FLUX_LORA | {"base_model_precision": "float8"}, count=4),
    "flux lora compiled": Step(FLUX_LORA | COMPILED, count=4),
    "sdxl full": Step(SDXL | RECOMPUTED, count=5, is_traced=True, has_peer=True),
    "sdxl split": Step(SDXL | RECOMPUTED | SPLIT, also=128),
    "sdxl split float8": Step(SDXL | RECOMPUTED | SPLIT | COMPILED | {"float8": True}),
    "sdxl zero-2 cpu": Step(SDXL | RECOMPUTED | {"zero_stage": 2, "offload_optimizer": "cpu"}, 1, 2, also=128),
    "sdxl streamed": Step(STREAMED, 1, 2, also=128),
    "sdxl streamed, offloaded": Step(STREAMED | {"offload_activations": True}, 1, 2, also=128),
    "sdxl lokr": Step(SDXL_LOKR | SINGLE, count=5, is_traced=True),
    "sdxl lokr, compiled": Step(SDXL_LOKR | SINGLE | COMPILED, count=5, is_traced=True),
    "sdxl lokr, batch 4": Step(SDXL_LOKR | {"train_batch_size": 4}, count=5),
    "sdxl lokr, batch 8": Step(SDXL_LOKR, count=5),
    "sd3 lora": Step(SD3 | LORA | KEPT | {"train_batch_size": 3, "lora_rank": 128}, count=5),
    "z-image lora": Step(Z_IMAGE | LORA | KEPT | SINGLE | {"lora_rank": 64}, count=5),
    "qwen-image lora": Step(QWEN | LORA | RECOMPUTED | SINGLE | {"lora_rank": 8}, count=4),
    "wan lora clip": Step(WAN | LORA | RECOMPUTED | SINGLE, 1, 2, frames=33),
    **LEVERS,
}


def settings_of(flags: Flags) -> Any:
    from simpletuner.settings import load

    return load(flags, complete=False, environment={}).settings


def shape_of(step: Step, resolution: int, tiny: bool) -> Any:
    """Return the shape of samples; clips have the proportions of 832x480 px."""
    from simpletuner.settings.values.shape import SampleShape, Shape

    if step.frames == 1:
        return SampleShape(Shape(1, resolution, resolution))
    return SampleShape(
        Shape(5, resolution, resolution) if tiny else Shape(step.frames, resolution, resolution * 26 // 15)
    )


def on_gpu(tiny: bool) -> bool:
    import torch

    return torch.cuda.is_available() and not tiny


def card_here(tiny: bool) -> str:
    """Return the name by which `plan` knows this GPU; empty for another one and without one."""
    import torch

    from simpletuner.parallel.devices import DEVICES, device_by_driver_name

    device = device_by_driver_name(torch.cuda.get_device_name()) if on_gpu(tiny) else None
    return next((name for name, each in DEVICES.items() if each is device), "")


def used_mib() -> int:
    """Return what nvidia-smi shows of the GPU, other processes included; 0 without it."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def peaks(tiny: bool) -> Record:
    """Return the most that tensors took, that torch holds, and that nvidia-smi shows, in MiB."""
    import torch

    if not on_gpu(tiny):
        return {}
    held = torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB
    return {"peak, MiB": held[0], "reserved, MiB": held[1], "nvidia-smi, MiB": used_mib()}


def forget_peaks(tiny: bool) -> None:
    import torch

    if on_gpu(tiny):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(name: str, tiny: bool) -> None:
    """Take steps of an engine of true size, as `plan --measure` does."""
    import torch

    from simpletuner.counting.step_memory import Workload
    from simpletuner.report import Report
    from simpletuner.tools.plan.estimate import opened_family
    from simpletuner.tools.plan.measure import random_engine, random_inputs, timed_steps

    step, began = STEPS[name], time.monotonic()
    settings = settings_of(step.flags_here(tiny))
    torch.manual_seed(0)
    with opened_family(settings, Report(quiet=True)) as family, random_engine(settings, family) as (engine, world):
        tell(step=name, what="building, s", here=time.monotonic() - began, **peaks(tiny))
        inputs: Record = {}
        for resolution in step.resolutions(tiny):
            inputs = random_inputs(settings, Workload(family, shape_of(step, resolution, tiny)), world.device)
            for number, (seconds, norm) in enumerate(timed_steps(settings, family, engine, inputs, step.warm_up), 1):
                tell(step=name, resolution=resolution, what=f"warm-up step {number}, s", here=seconds, norm=norm)
            forget_peaks(tiny)
            taken = list(timed_steps(settings, family, engine, inputs, step.count))
            tell_step(
                name, step, resolution, tiny, [seconds for seconds, _ in taken], norms=[norm for _, norm in taken]
            )
        if step.is_traced:
            trace(name, lambda: list(timed_steps(settings, family, engine, inputs, 1)), tiny)
        if on_gpu(tiny):
            tell(step=name, what="optimizer alone, s", here=optimizer_alone(engine, settings))
    if step.has_peer:
        del engine, world
        inputs.clear()
        gc.collect()
        forget_peaks(tiny)
        from gpu.peer import measure_diffusers_step

        measure_diffusers_step(name, step, tiny)


def tell_step(name: str, step: Step, resolution: int, tiny: bool, seconds: list[float], **more: object) -> None:
    """Tell what steps took, with the settings, which is all that a plan of them needs."""
    flags = step.flags_here(tiny) | {"resolution": resolution}
    found = {
        "card": card_here(tiny),
        "frames": step.frames,
        "s/step": median(seconds),
        "seconds": seconds,
        **peaks(tiny),
    }
    tell(step=name, kind="measured", resolution=resolution, flags=flags, **found, **more)


def optimizer_alone(engine: Any, settings: Any) -> float | str:
    """Return the seconds of the update by itself; not where gradients are released or DeepSpeed's."""
    import torch

    if settings.parallel.zero_stage is not None or engine.updates_in_backward:
        return "not apart"
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < 3:  # weights on the host take seconds
        for each in engine.parameters.values():
            each.parameter.grad = torch.full_like(each.parameter, 1e-3)
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.step(settings.optimizer.max_grad_norm)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)


def trace(name: str, take_step: Callable[[], object], tiny: bool) -> None:
    """Trace one step: how long the GPU was busy, its launches, and the kernels that took longest."""
    from torch.profiler import ProfilerActivity, profile

    gpu = on_gpu(tiny)
    # On a GPU its kernels alone: with the operators of the host a trace of FLUX takes longer to write than to make.
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiled:
        began = time.perf_counter()
        take_step()
        seconds = time.perf_counter() - began
    events = [each for each in profiled.key_averages() if not gpu or "CUDA" in str(each.device_type)]
    spent = [(e.key[:90], e.count, (e.self_device_time_total if gpu else e.self_cpu_time_total) / 1e6) for e in events]
    spent.sort(key=lambda each: -each[2])
    busy, launches = sum(each[2] for each in spent), sum(each[1] for each in spent)
    tell(step=name, kind="trace", seconds=seconds, busy=busy, launches=launches, top=spent[:30])
    if gpu and (out := os.environ.get("OUT")):
        file = Path(out) / f"trace-{name.replace(' ', '_').replace(',', '')}.json.gz"
        profiled.export_chrome_trace(str(file))
        if file.stat().st_size > TRACE_BYTES:
            file.unlink()
