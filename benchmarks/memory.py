"""Bytes per parameter that each state layout takes, beside its theory: a Flux of 60 million parameters on the CPU.

What is counted is what the C library has handed out: between steps, with gradients, and at most while the optimizer
steps. Activations are freed before. Each layout runs in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from interleaved import print_table

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from malloc_info import allocated_bytes  # pyright: ignore[reportMissingImports]
from zero import build_flux, flux_inputs

from simpletuner.models.families.flux import Flux
from simpletuner.parallel.engine import Engine
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.world import joined_world
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.declared.sections import Model, Optimizer, Parallel, Training
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.build import open_engine

RELEASED = Optimizer(optimizer_release_gradients=True, max_grad_norm=0)
LAYOUTS = {
    "fp32": (Optimizer(), Parallel(), (12, 16)),
    "fp32, FSDP2 on one rank": (Optimizer(), Parallel(fsdp_enable=True), (12, 16)),
    "split": (Optimizer(state_layout="split"), Parallel(), (6.06, 8.06)),
    "fp32, gradients released": (RELEASED, Parallel(), (12, 12)),
    "split, gradients released": (RELEASED.model_copy(update={"state_layout": "split"}), Parallel(), (6.06, 6.06)),
    "split, FSDP2 on one rank": (Optimizer(state_layout="split"), Parallel(fsdp_enable=True), (6.06, 8.06)),
}
"""Settings, and bytes per parameter in theory: of weights and moments, and with gradients."""


@contextmanager
def watched(peaks: list[int]) -> Iterator[None]:
    """Note what is allocated, every millisecond."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peaks.append(allocated_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def measure(layout: str, folder: Path, answer: Connection) -> None:
    """Send bytes per parameter: between steps, with gradients, and at most in a step."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    optimizer, parallel, _ = LAYOUTS[layout]
    training = Training(mixed_precision="bf16", gradient_checkpointing=True)
    settings = Settings(model=Model(model_family="flux"), training=training, optimizer=optimizer, parallel=parallel)
    with joined_world() as world:
        session = Session(Loaded(settings, {}), build_mesh(settings, world), Report(quiet=True), StopRequest())
        family = Flux.open(folder / "flux", settings)
        family.denoiser()  # what it imports would be counted otherwise
        before = allocated_bytes()
        with closing(open_engine(session.settings, session.mesh, family, None)) as engine:
            backward(engine)
            engine.step(optimizer.max_grad_norm)  # moments come with the first step
            held = allocated_bytes()
            backward(engine)
            peaks = [with_gradients := allocated_bytes()]
            with watched(peaks):
                engine.step(optimizer.max_grad_norm)
            found = [held, with_gradients, max(peaks)]
            answer.send([(each - before) / engine.num_parameters for each in found])


def backward(engine: Engine) -> None:
    inputs = flux_inputs()
    floating = {"hidden_states", "encoder_hidden_states", "pooled_projections"}
    inputs = {name: each.bfloat16() if name in floating else each for name, each in inputs.items()}
    with engine.micro_batch(True):
        engine.backward(engine.model(**inputs)[0].float().square().mean())


def main() -> None:
    rows = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_flux(folder / "flux")
        for layout, (_, _, theory) in LAYOUTS.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=measure, args=(layout, folder, theirs))
            process.start()
            theirs.close()
            process.join()
            if process.exitcode:
                sys.exit(f"{layout}: exit code {process.exitcode}")
            held, with_gradients, peak = ours.recv()
            cells = [f"{held:.2f} / {theory[0]:g}", f"{with_gradients:.2f} / {theory[1]:g}", f"{peak:.2f}"]
            rows.append([layout, *cells])
    columns = ["layout", "between steps", "with gradients", "at most in a step"]
    print_table("bytes per parameter, measured / theory", columns, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
