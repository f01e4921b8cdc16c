"""Loss on held-out images, at fixed noise and noise levels: it tells learning from memorizing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from simpletuner.data.prefetch import Batch, RankSlice, SampleReader, collate
from simpletuner.data.sampler.batch_sampler import GlobalBatch
from simpletuner.data.samples.samples import held_out_batches
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import Objective, sample_losses
from simpletuner.parallel.engine import Engine, compute_dtype, evaluation
from simpletuner.parallel.mesh import Mesh
from simpletuner.preparation.prepare import Prepared
from simpletuner.session import Session
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.ema import EMA, evaluated_variants, weights_of
from simpletuner.training.metrics.metrics import Metrics

NAMES = {"trained": "eval_loss", "ema": "eval_loss_ema"}
"""Names of a loss in the metrics, by the weights that it is measured with."""


@dataclass(frozen=True)
class HeldOutLoss:
    """Measure each held-out image at several timesteps, one from each equal part of their range.

    An image's noise, timesteps and caption depend on the seed and its id alone, so the losses of all steps,
    and of runs on any number of ranks, are those of the same inputs.
    """

    family: ModelFamily
    objective: Objective
    engine: Engine
    mesh: Mesh
    ema: EMA | None
    variants: tuple[str, ...]
    reader: SampleReader
    batches: Sequence[GlobalBatch]
    """All held-out images, however many ranks share them."""
    rank_slice: RankSlice
    timesteps: int
    """Number of timesteps for each image."""
    dtype: torch.dtype
    interval: int
    metrics: Metrics | None
    title: str = "measuring the loss on held-out images"

    def count(self, step: int) -> int:
        """Return the number of batches that are measured."""
        return len(self.variants) * len(self.batches) * self.timesteps

    def run(self, step: int, advance: Callable[[int], None]) -> None:
        """Measure, and on rank 0 write a row of metrics. Collective."""
        losses = {}
        for variant in self.variants:
            with weights_of(self.ema, variant):
                losses[NAMES[variant]] = self.measure(advance)
        if self.metrics is not None:
            self.metrics.write({"step": step, **losses}, "eval")

    def is_complete(self, step: int) -> bool:
        """True if the metrics have the loss of a step. Collective."""
        last = self.metrics.last_step("eval_loss") if self.metrics is not None else -1
        return int(self.mesh.world.gather_texts(str(last))[0]) >= step

    def measure(self, advance: Callable[[int], None]) -> float:
        """Return the mean loss over all images and timesteps. Collective."""
        device = self.mesh.world.device
        # In float64, since the order of additions depends on the number of ranks.
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with evaluation(self.engine) as denoiser:
            for batch, weight in self._own_batches():
                losses = self._losses(denoiser, batch.to(device, self.family.host_inputs))
                total += weight * torch.stack([losses.double().sum(), torch.full_like(losses[0], len(losses)).double()])
                advance(self.mesh.data_size)
        loss, count = self.mesh.data_mean(total).tolist()
        return loss / count

    def _losses(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        noised = self.objective.add_noise(batch.latents, batch.noise, batch.u)
        latents = noised.x_t.to(self.dtype)
        prediction = self.family.predict(denoiser, latents, noised.timesteps, batch.conditioning)
        return sample_losses(prediction, noised.target, noised.weights, batch.loss_mask)

    def _own_batches(self) -> Iterator[tuple[Batch, int]]:
        """Yield this rank's batches with their weight, which is 0 for a batch that only keeps the other ranks
        company: each call of the denoiser gathers shards from all."""
        tasks = [(batch, part) for batch in self.batches for part in range(self.timesteps)]
        for first in range(0, len(tasks), self.mesh.data_size):
            index = first + self.mesh.data_rank
            batch, part = tasks[min(index, len(tasks) - 1)]
            # negative, as steps of training are counted from 0
            made = collate(self.reader, batch, range(len(batch.samples)), -1 - part, self.rank_slice)
            placed = replace(made, u=(part + made.u) / self.timesteps)
            yield placed.pinned() if self.rank_slice.pin else placed, int(index < len(tasks))


def open_held_out_loss(
    session: Session, family: ModelFamily, state: TrainingState, prepared: Prepared, metrics: Metrics | None
) -> HeldOutLoss:
    """Build what measures the loss on held-out images."""
    settings, validation, plan = session.settings, session.settings.validation, prepared.plan
    return HeldOutLoss(
        family=family,
        objective=family.objective(),
        engine=state.engine,
        mesh=session.mesh,
        ema=state.ema,
        variants=evaluated_variants(state.ema, validation),
        reader=prepared.reader,
        batches=held_out_batches(plan.samples, plan.held_out, settings.training.train_batch_size),
        rank_slice=RankSlice(0, 1, 1, settings.training.seed, False, pin=session.world.device.type == "cuda"),
        timesteps=validation.eval_timesteps,
        dtype=compute_dtype(settings),
        interval=validation.eval_step_interval,
        metrics=metrics,
    )
