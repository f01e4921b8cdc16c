"""The parts of a check, in the order of what is worth knowing first, and how one is run in this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from gpu.steps import LEVERS

from simpletuner.run_log import silence_torchao
from simpletuner.system.processes.signals import terminate_with_parent


@dataclass(frozen=True)
class Part:
    """A measurement in a process of its own: an error, a hang or memory that is not freed costs no other part."""

    module: str
    """Whose function of the part's name, or `measure(name, tiny)`, tells its figures as soon as they are there. It is
    imported by the part's own process: torch is not by the driver, which must not ask for the GPU."""
    expects: float
    """Seconds that it takes by estimate; it is not begun with less than half of them left."""
    limit: float
    """Seconds after which it is ended. What it has told by then is kept."""
    needs_gib: float = 0
    """Memory of a GPU on which it fits."""
    replaced_from_gib: float = float("inf")
    """Memory of a GPU on which another part measures the same at its true precision."""


def all_parts() -> dict[str, Part]:
    return dict(ordered())


def ordered() -> Iterator[tuple[str, Part]]:
    def of(name: str, expects: float, limit: float, **memory: float) -> tuple[str, Part]:
        return name, Part("steps", expects, limit, **memory)

    yield "environment", Part("machine", 8, 60)
    yield "layouts", Part("machine", 8, 40)
    yield "smoke", Part("tiny_runs", 25, 90)
    yield "matrix", Part("tiny_runs", 90, 200)
    yield "kernel", Part("machine", 10, 40)
    yield of("flux lora", 40, 70)
    yield of("sdxl full", 30, 70)
    yield of("flux full", 50, 90, needs_gib=110)
    yield of("flux full, 80 GB", 45, 90, needs_gib=70, replaced_from_gib=110)
    yield of("sdxl zero-2 cpu", 60, 110)
    yield of("sdxl streamed", 50, 90)
    yield "rates", Part("machine", 15, 40)
    yield of("sdxl lokr", 20, 60)
    yield of("qwen-image lora", 50, 90, needs_gib=70)
    yield of("flux full, compiled", 120, 200, needs_gib=135)
    yield of("wan lora clip", 45, 80)
    yield of("sdxl lokr, batch 4", 20, 60)
    yield of("sdxl lokr, batch 8", 20, 60)
    yield of("flux lora int8", 30, 60)
    yield of("flux lora nf4", 40, 70)
    yield of("sdxl split", 20, 40)
    yield of("sd3 lora", 30, 60)
    yield of("z-image lora", 30, 60)
    yield of("flux lora compiled", 70, 120)
    yield of("sdxl lokr, compiled", 70, 120)
    yield of("flux lora float8", 30, 60)
    yield of("sdxl split float8", 180, 240)
    yield of("flux lora int8 products", 30, 60)
    yield of("sdxl streamed, offloaded", 50, 90)
    yield "waits", Part("machine", 15, 40)
    yield "link", Part("machine", 20, 60)
    for name in LEVERS:
        yield of(name, 120, 200, needs_gib=135)


def run_part(name: str, tiny: bool) -> None:
    """Run a part in this process, which ends with the driver that has started it, as do the runs that it starts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs of a part are told and killed
    terminate_with_parent()
    silence_torchao()
    module = import_module(f"gpu.{all_parts()[name].module}")
    if hasattr(module, name):
        getattr(module, name)(tiny)
    else:
        module.measure(name, tiny)
