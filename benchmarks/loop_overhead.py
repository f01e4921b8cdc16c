"""What our loop costs: beside a hand-written one that trains the same U-Net on the same batches in the same process.

Ours is what `simpletuner train` runs: prefetched batches, objective, engine, step logger and metrics, as the worker
connects them. The plain one holds every batch in memory already, noise and timesteps included, and logs nothing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import print_table, ratio, seconds_in_turns
from torch import Tensor, nn

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import Batch, SampleReader
from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler, SamplerState
from simpletuner.data.sampler.epoch_order import Bucket
from simpletuner.data.samples.samples import Sample, Samples
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.models.families.sdxl import SDXL
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.tiny.build import build_tiny
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.torch_engine import sharded_parameters
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation.plan import Plan
from simpletuner.preparation.prepare import Prepared
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.declared.sections import Model, Training
from simpletuner.settings.values.shape import Shape
from simpletuner.system.processes.signals import StopRequest
from simpletuner.training.build import build_trainer, open_engine
from simpletuner.training.checkpointer import Checkpointer, TrainingState
from simpletuner.training.metrics.metrics import open_metrics
from simpletuner.training.metrics.speed import Durations
from simpletuner.training.optimizers import Schedule, make_optimizer
from simpletuner.training.trainer import Trainer

ROUNDS, STEPS, BATCH_SIZE, SAMPLES = 100, 4, 4, 64
GOAL = 1.02


def settings_in(folder: Path) -> Settings:
    """Return the settings of a float32 run towards epsilon, without recomputed activations."""
    training = Training(
        output_dir=folder, train_batch_size=BATCH_SIZE, mixed_precision="no", gradient_checkpointing=False
    )
    return Settings(model=Model(prediction_type="epsilon"), training=training)


def data_in_memory(family: ModelFamily, settings: Settings) -> Prepared:
    """Return random latents and embeddings that take no time to read."""
    square = Shape(1, 64, 64)
    geometry = Geometry(square, square, (0, 0), square)
    samples = [Sample(str(n), "drawn", LocalStorage(Path()), "", "", geometry, ("a caption",)) for n in range(SAMPLES)]
    latents = {sample.id: torch.randn(4, 16, 16) for sample in samples}
    text = {"prompt_embeds": torch.randn(77, 96), "pooled_prompt_embeds": torch.randn(64)}
    dataset = LocalImages(id="drawn", instance_data_dir=Path())
    source = SampleReader(
        samples=samples,
        dataset=lambda index: dataset,
        latents=lambda sample: latents[sample.id],
        image=lambda sample: family.size_conditioning(sample.geometry),
        text=lambda sample, caption: text,
        no_caption=lambda sample: {name: torch.zeros_like(value) for name, value in text.items()},
    )
    buckets = {"one": Bucket({1: np.arange(SAMPLES)})}
    sampler = GlobalBatchSampler(buckets, settings.training.seed)
    plan = Plan([], [], Samples(), buckets, sampler, "", np.zeros(0, int))
    return Prepared(plan, source, [])


class Nowhere(Checkpointer):
    """A checkpointer that writes nothing."""

    def save(self, step: int, sampler_state: SamplerState) -> None:
        """Do not save."""


class Ours:
    """Our loop, called for some steps at a time; it neither validates nor saves, nor keeps how long saving took."""

    def __init__(self, session: Session, trainer: Trainer, state: TrainingState) -> None:
        nowhere = Nowhere(session, state, durations := Durations(), size_bytes=0)
        self.trainer = replace(trainer, evaluations=(), checkpointer=nowhere, durations=durations, max_steps=0)

    def __call__(self) -> None:
        """Train for the next steps."""
        self.trainer.max_steps += STEPS
        self.trainer.train()


class Plain:
    """The shortest loop that trains alike."""

    def __init__(self, family: ModelFamily, settings: Settings, batches: Sequence[Batch]) -> None:
        from diffusers import DDPMScheduler, UNet2DConditionModel

        self.model: nn.Module = UNet2DConditionModel.from_pretrained(family.folder / "unet").train()
        self.optimizer = make_optimizer(sharded_parameters(self.model.named_parameters()), settings.optimizer)
        self.max_grad_norm = settings.optimizer.max_grad_norm
        scheduler: Any = DDPMScheduler.from_pretrained(family.folder / "scheduler")
        self.alphas: Tensor = scheduler.alphas_cumprod
        timesteps = [(batch.u * len(self.alphas)).long() for batch in batches]
        self.waiting = zip(batches, timesteps, strict=True)

    def __call__(self) -> None:
        """Train for the next steps."""
        for batch, timesteps in islice(self.waiting, STEPS):
            a = self.alphas[timesteps].view(-1, 1, 1, 1)
            noisy = a.sqrt() * batch.latents + (1 - a).sqrt() * batch.noise
            text, pooled, time_ids = (
                batch.conditioning[name] for name in ("prompt_embeds", "pooled_prompt_embeds", "time_ids")
            )
            added = {"text_embeds": pooled, "time_ids": time_ids}
            answer = self.model(noisy, timesteps, text, added_cond_kwargs=added, return_dict=False)[0]
            nn.functional.mse_loss(answer, batch.noise).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def largest_difference(ours: nn.Module, plain: nn.Module) -> float:
    """Return by how much any two weights differ: next to nothing, if both loops did the same work."""
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def measure(world: World, folder: Path) -> None:
    """Build both loops, let them take turns, and print the table."""
    settings = settings_in(folder)
    build_tiny(Model(model_family="sdxl"), folder / "base")
    session, family = (
        Session(Loaded(settings, {}), Mesh(world), Report(quiet=True), StopRequest()),
        SDXL.open(folder / "base", settings),
    )
    prepared = data_in_memory(family, settings)
    engine = open_engine(session.settings, session.mesh, family, None)
    state = TrainingState(engine, None, {}, {}, "", Schedule(STEPS), 0, prepared.plan.sampler.start(BATCH_SIZE))
    with open_metrics(session, 0) as metrics:
        build: Callable[[], Trainer] = partial(build_trainer, session, family, prepared, state, metrics)
        batches = [step.micro_batches[0] for step in islice(build().batches, (ROUNDS + 1) * STEPS)]
        plain = Plain(family, settings, batches)
        seconds = seconds_in_turns({"ours": Ours(session, build(), state), "plain": plain}, ROUNDS)
    rows = [[name, f"{statistics.median(values) / STEPS * 1000:.1f}"] for name, values in seconds.items()]
    rows.append(["ours / plain", f"{ratio(seconds, 'ours', 'plain'):.3f}"])
    title = f"milliseconds per step (median of {ROUNDS} rounds of {STEPS} steps; goal: ratio <= {GOAL})"
    print_table(title, ["loop", "ms"], rows)
    print(f"  both trained alike: weights differ by at most {largest_difference(engine.module, plain.model):.0e}")


def main() -> None:
    """Measure in a temporary folder, in a world of one."""
    with tempfile.TemporaryDirectory() as name, joined_world() as world:
        measure(world, Path(name))


if __name__ == "__main__":
    main()
