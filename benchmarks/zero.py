"""Overhead of our DeepSpeed engine: each ZeRO stage compared with a bare `deepspeed.initialize` loop, on two ranks.

Seconds are of the tiny SDXL, where everything but arithmetic weighs most; both loops take turns in one process. Memory
is of a Flux of 60 million parameters, each loop in its own processes: the peak increase of a rank's memory while it
builds and takes two steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from interleaved import print_table, ratio, seconds_in_turns
from loop_overhead import Ours, data_in_memory, settings_in
from torch import Tensor, nn

from simpletuner.deepspeed.engine import engine_config
from simpletuner.deepspeed.startup import import_deepspeed
from simpletuner.models.families.flux import Flux
from simpletuner.models.families.sdxl import SDXL
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.tiny.build import build_tiny
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.torch_engine import sharded_parameters
from simpletuner.parallel.world import World, joined_world
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.declared.sections import Launch, Model, Parallel
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.build import build_trainer, open_engine
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.metrics.metrics import open_metrics
from simpletuner.training.optimizers import Schedule, make_optimizer

RANKS, STEPS, GOAL = 2, 4, 1.05
ROUNDS = {1: 40, 2: 40, 3: 10}
"""By stage: steps of stage 3 take four times as long."""
CONFIG: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": 5_000_000}}
"""DeepSpeed's default, 2 GB in float32, would hide all other memory."""
STAGES = {f"ZeRO-{stage}": Parallel(zero_stage=stage, deepspeed_config=CONFIG) for stage in (1, 2, 3)}
STAGES["ZeRO-3, CPU"] = STAGES["ZeRO-3"].model_copy(update={"offload_optimizer": "cpu", "offload_param": "cpu"})


def settings_of(folder: Path, stage: str, family: str) -> Settings:
    plain = settings_in(folder)
    return plain.model_copy(
        update={
            "model": Model(model_family=family, prediction_type="epsilon" if family == "sdxl" else None),
            "launch": Launch(num_processes=RANKS),
            "parallel": STAGES[stage],
            "training": plain.training.model_copy(update={"train_batch_size": 2}),
        }
    )


def bare_engine(model: nn.Module, settings: Settings) -> Any:
    """Wrap a model as DeepSpeed's documentation does."""
    import deepspeed

    config = engine_config(settings, RANKS, max(parameter.numel() for parameter in model.parameters()))
    optimizer = make_optimizer(sharded_parameters(model.named_parameters()), settings.optimizer)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class BareLoop:
    """The shortest loop over a DeepSpeed engine; all batches are in memory already."""

    def __init__(self, family: ModelFamily, settings: Settings, batches: list[Any]) -> None:
        from diffusers import DDPMScheduler, UNet2DConditionModel

        unet: Any = UNet2DConditionModel.from_pretrained(family.folder / "unet")
        self.engine = bare_engine(unet.train(), settings)
        scheduler: Any = DDPMScheduler.from_pretrained(family.folder / "scheduler")
        self.alphas: Tensor = scheduler.alphas_cumprod
        self.waiting = iter([(batch, (batch.u * len(self.alphas)).long()) for batch in batches])

    def __call__(self) -> None:
        """Train for the next `STEPS` steps."""
        for batch, timesteps in islice(self.waiting, STEPS):
            a = self.alphas[timesteps].view(-1, 1, 1, 1)
            noisy = a.sqrt() * batch.latents + (1 - a).sqrt() * batch.noise
            cond = batch.conditioning
            added = {"text_embeds": cond["pooled_prompt_embeds"], "time_ids": cond["time_ids"]}
            output = self.engine(noisy, timesteps, cond["prompt_embeds"], added_cond_kwargs=added, return_dict=False)[0]
            self.engine.backward(nn.functional.mse_loss(output, batch.noise))
            self.engine.step()


def seconds_of(stage: str, folder: Path, world: World) -> list[str]:
    """Run both loops in turns at a stage, and return a row of the table."""
    settings = settings_of(folder, stage, "sdxl")
    session = Session(Loaded(settings, {}), build_mesh(settings, world), Report(quiet=True), StopRequest())
    family = SDXL.open(folder / "sdxl", settings)
    prepared, batch_size = data_in_memory(family, settings), settings.effective_batch_size
    with (
        closing(open_engine(session.settings, session.mesh, family, None)) as engine,
        open_metrics(session, 0) as metrics,
    ):
        state = TrainingState(engine, None, {}, {}, "", Schedule(STEPS), 0, prepared.plan.sampler.start(batch_size))
        build = partial(build_trainer, session, family, prepared, state, metrics)
        rounds = ROUNDS[STAGES[stage].zero_stage or 0]
        batches = [step.micro_batches[0] for step in islice(build().batches, (rounds + 1) * STEPS)]
        bare = BareLoop(family, settings, batches)
        seconds = seconds_in_turns({"ours": Ours(session, build(), state), "bare": bare}, rounds)
        bare.engine.destroy()
    medians = [f"{statistics.median(seconds[name]) / STEPS * 1000:.1f}" for name in ("ours", "bare")]
    return [stage, *medians, f"{ratio(seconds, 'ours', 'bare'):.3f}"]


def compare_seconds(folder: Path, report: Path) -> None:
    """Measure every stage, on one rank of the group."""
    with joined_world() as world:
        import_deepspeed(world)
        rows = [seconds_of(stage, folder, world) for stage in STAGES]
        if world.is_first:
            report.write_text(json.dumps(rows))


def held_bytes() -> int:
    """Return this process's anonymous memory, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure_memory(stage: str, ours: bool, folder: Path, report: Path) -> None:
    """Build a Flux and take two steps; write the peak increase of this rank's memory."""
    from diffusers import FluxTransformer2DModel

    with joined_world() as world:
        import_deepspeed(world)
        settings = settings_of(folder, stage, "flux")
        before, peaks, done = held_bytes(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                peaks.append(held_bytes() - before)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        if ours:
            family = Flux.open(folder / "flux", settings)
            session = Session(Loaded(settings, {}), build_mesh(settings, world), Report(quiet=True), StopRequest())
            engine: Any = open_engine(session.settings, session.mesh, family, None).model
        else:
            whole: Any = FluxTransformer2DModel.from_pretrained(folder / "flux" / "transformer")
            engine = bare_engine(whole, settings)
        for _ in range(2):
            engine.backward(engine(**flux_inputs())[0].square().mean())
            engine.step()
        done.set()
        watcher.join()
        (report / f"{world.rank}").write_text(str(max(peaks)))


def flux_inputs() -> dict[str, Any]:
    """Return a small image and a short text."""
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    text = {"encoder_hidden_states": torch.randn(1, 8, 768), "pooled_projections": torch.randn(1, 768)}
    time_and_guidance = {"timestep": torch.ones(1), "guidance": torch.ones(1)}
    return {"hidden_states": torch.randn(1, 16, 64), **places, **text, **time_and_guidance, "return_dict": False}


def build_flux(folder: Path) -> None:
    """Write a Flux of 60 million parameters, with just what loading its transformer needs."""
    from diffusers import FluxTransformer2DModel

    build_tiny(Model(model_family="flux"), folder)
    FluxTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=3, attention_head_dim=64, num_attention_heads=10,
        axes_dims_rope=(16, 24, 24), joint_attention_dim=768, pooled_projection_dim=768, guidance_embeds=True,
    ).save_pretrained(folder / "transformer")  # fmt: skip


def as_rank(rank: int, port: int, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
    action(*arguments)


def on_ranks(action: Callable[..., None], *arguments: Any) -> None:
    """Run an action on all ranks, each in its own process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=as_rank, args=(rank, port, action, arguments)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny(Model(model_family="sdxl"), folder / "sdxl")
        build_flux(folder / "flux")
        on_ranks(compare_seconds, folder, folder / "seconds")
        rows = json.loads((folder / "seconds").read_text())
        rounds = f"medians of {min(ROUNDS.values())} rounds or more of {STEPS}"
        title = f"milliseconds per step on {RANKS} ranks ({rounds}; goal: <= {GOAL})"
        print_table(title, ["stage", "ours", "bare", "ours / bare"], rows)
        rows = []
        for stage in STAGES:
            peaks = {}
            for ours in (True, False):
                report = folder / f"{time.monotonic_ns()}"
                report.mkdir()
                on_ranks(measure_memory, stage, ours, folder, report)
                peaks[ours] = max(int(path.read_text()) for path in report.iterdir())
            rows.append([stage, *(f"{peaks[ours] / 2**20:.0f}" for ours in (True, False))])
        print_table("peak MiB of a rank (Flux, 60 million parameters)", ["stage", "ours", "bare"], rows)


if __name__ == "__main__":
    main()
