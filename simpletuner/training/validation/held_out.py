"""Loss on held-out images, at fixed noise and noise levels: it tells learning from memorizing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor, nn

from simpletuner.data.prefetch import LATENTS, Batch, RankSlice, SampleReader, collate
from simpletuner.data.sampler.batch_sampler import GlobalBatch
from simpletuner.data.samples.samples import held_out_batches
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import Objective
from simpletuner.models.family.streams import STREAM_NAMES, noise_streams, predict_streams, stream_losses, weighted_sum
from simpletuner.parallel.engine import Engine, compute_dtype, evaluation
from simpletuner.parallel.mesh import Mesh
from simpletuner.preparation.plan import Plan
from simpletuner.preparation.prepare import Prepared
from simpletuner.report import Report
from simpletuner.runs.health.alarms import Alarm, find_unchanged
from simpletuner.runs.health.best_step import PARTS, PARTS_OF, SET, BestStep, find_best, read_measured
from simpletuner.runs.metrics import HELD_OUT, LEVEL_OF, LEVELS
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.system.numbers import count_noun
from simpletuner.training.checkpointer import TrainingState
from simpletuner.training.ema import EMA, evaluated_variants, weights_of
from simpletuner.training.metrics.metrics import Metrics
from simpletuner.training.trainer import Verdict

if TYPE_CHECKING:
    from simpletuner.training.alarms import RunAlarms

NAMES: Mapping[str, str] = dict(zip(("trained", "ema"), HELD_OUT, strict=True))
"""Names of a loss in the metrics, by the weights that it is measured with."""


@dataclass
class BestWatch:
    """Judge each evaluation by those before, on rank 0 from the metrics on disk, and tell all ranks.

    Nothing is kept but the file, so a run that is resumed, or goes back, judges as an undisturbed one does.
    """

    report: Report
    verdict: Verdict
    saves_best: bool
    """True where the best step is to have a checkpoint (`export_best`)."""
    patience: int
    """Evaluations in a row above the best, after which training ends; 0: it goes on."""
    images: int
    """Number of images that are trained on."""
    samples_per_step: int
    max_steps: int
    alarms: Callable[[], RunAlarms]
    """Of rank 0."""
    said_of: int = -1
    """The best step of which it was said that the loss has risen since."""
    said_unchanged: bool = False

    def judge(self, step: int, metrics: Metrics | None, mesh: Mesh) -> None:
        """Set the verdict on the evaluation of a step. Collective where it has consequences."""
        measured = read_measured(metrics.path.parent) if metrics is not None else []
        found = find_best(measured)
        if found is not None and found.has_risen and found.best.step != self.said_of:
            self.said_of = found.best.step
            self.alarms().tell(self.rise(found))
        if not self.said_unchanged and (unchanged := find_unchanged(measured, self.max_steps)) is not None:
            self.said_unchanged = True
            self.alarms().tell(unchanged)
        if not (self.saves_best or self.patience):
            return
        ends = found is not None and 0 < self.patience <= found.above
        is_best = found is not None and found.best.step == step
        decided = mesh.world.gather_texts(f"{int(ends)}{int(is_best and self.saves_best)}")[0]
        self.verdict.ends, saves = (each == "1" for each in decided)
        self.verdict.save_at = step if saves else -1
        if self.verdict.ends and found is not None:
            evaluations = count_noun(found.above, "evaluation")
            self.report.say(f"training ends at step {step:,}, after {evaluations} in a row above the best one")

    def rise(self, found: BestStep) -> Alarm:
        """Return the alarm of a loss that has risen since the best step."""
        last, most, above = found.since[-1], found.most_overfitted(), count_noun(found.above, "evaluation")
        best = f"the best was step {found.best.step:,}" if found.best.step else "no step was better than the base model"
        where = f", most {most}" if most else ""
        seen = last.step * self.samples_per_step / max(1, self.images)
        return Alarm(
            "held-out loss",
            f"the held-out loss rises: {best} ({found.best.loss:.4f}), and the last {above} "
            f"are above it, step {last.step:,} by {last.difference_to(found.best)}{where}; "
            f"{count_noun(self.images, 'image')} have been seen {seen:.0f} times each",
            "docs/good-fine-tune.md says what helps; `simpletuner runs export FOLDER --checkpoint=best` writes the "
            "best step, and early_stopping_patience ends such a run",
        )


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
    group_of: Mapping[int, int]
    """Group of images, whose mean loss is recorded, by the index of each held-out image."""
    measured: str
    """Digest of what is measured."""
    watch: BestWatch
    title: str = "measuring the loss on held-out images"

    def count(self, step: int) -> int:
        """Return the number of batches that are measured."""
        return len(self.variants) * len(self.batches) * self.timesteps

    def run(self, step: int, advance: Callable[[int], None]) -> None:
        """Measure, write a row of metrics on rank 0, and judge it. Collective."""
        row: dict[str, object] = {"step": step}
        for variant in self.variants:
            with weights_of(self.ema, variant):
                row |= self.measure(NAMES[variant], advance)
        if self.metrics is not None:
            self.metrics.write({**row, SET: self.measured}, "eval")
        self.watch.judge(step, self.metrics, self.mesh)

    def is_complete(self, step: int) -> bool:
        """True if the metrics have a step's loss, which is then judged as when written. Collective."""
        last = self.metrics.last_step([*NAMES.values()]) if self.metrics is not None else -1
        is_there = int(self.mesh.world.gather_texts(str(last))[0]) >= step
        if is_there:
            self.watch.judge(step, self.metrics, self.mesh)
        return is_there

    def measure(self, name: str, advance: Callable[[int], None]) -> dict[str, float | list[float]]:
        """Return the mean loss over all images and timesteps as `name`, and those of parts of both, and of
        each stream where there are several. Collective."""
        device, ranges, groups = self.mesh.world.device, min(self.timesteps, LEVELS), max(self.group_of.values()) + 1
        # In float64, since the order of additions depends on the number of ranks.
        total = torch.zeros(2, dtype=torch.float64, device=device)
        weights = self.family.stream_weights
        streams = [LATENTS, *weights] if weights else []
        of_streams = torch.zeros(2, len(streams), dtype=torch.float64, device=device)
        cells = torch.zeros(2, ranges, groups, dtype=torch.float64, device=device)
        with evaluation(self.engine) as denoiser:
            for batch, weight, part, indices in self._own_batches():
                by_stream = self._losses(denoiser, batch.to(device, self.family.host_inputs))
                losses = weighted_sum(by_stream, weights).double()
                for number, stream in enumerate(streams):
                    if (own := by_stream.get(stream)) is not None:
                        of_streams[:, number] += weight * torch.stack([own.double().sum(), torch.ones_like(own).sum()])
                values = weight * torch.stack([losses, torch.ones_like(losses)])
                total += values.sum(1)
                # A product, since additions by index have no order on a GPU.
                own = torch.zeros(len(indices), groups, dtype=torch.float64)
                own[range(len(indices)), [self.group_of[index] for index in indices]] = 1
                cells[:, part * ranges // self.timesteps] += values @ own.to(device)
                advance(self.mesh.data_size)
        means = self.mesh.data_mean(torch.cat([total, of_streams.flatten(), cells.flatten()]))
        (loss, count), rest = means[:2].tolist(), means[2:]
        split = zip(streams, *rest[: 2 * len(streams)].view(2, -1).tolist(), strict=True) if streams else ()
        named = {f"{name}_{STREAM_NAMES.get(each, each)}": own / number for each, own, number in split if number}
        sums, counts = rest[2 * len(streams) :].view(2, ranges, groups)
        of_levels = (sums.sum(1) / counts.sum(1)).tolist() if ranges > 1 else []
        levels = {LEVEL_OF.format(name, number, ranges): each for number, each in enumerate(of_levels, start=1)}
        return {name: loss / count, **named, **levels, PARTS_OF.format(name): (sums.sum(0) / counts.sum(0)).tolist()}

    def _losses(self, denoiser: nn.Module, batch: Batch) -> dict[str, Tensor]:
        noised = noise_streams(self.objective, batch)
        prediction = predict_streams(self.family, denoiser, noised, self.dtype, batch)
        return stream_losses(prediction, noised, batch.loss_mask)

    def _own_batches(self) -> Iterator[tuple[Batch, int, int, Sequence[int]]]:
        """Yield this rank's batches with their weight, part of the noise levels, and indices of images.

        The weight is 0 for a batch that only keeps the other ranks company: each call of the denoiser gathers
        shards from all.
        """
        tasks = [(batch, part) for batch in self.batches for part in range(self.timesteps)]
        for first in range(0, len(tasks), self.mesh.data_size):
            index = first + self.mesh.data_rank
            batch, part = tasks[min(index, len(tasks) - 1)]
            # negative, as steps of training are counted from 0
            made = collate(self.reader, batch, range(len(batch.samples)), -1 - part, self.rank_slice)
            placed = replace(made, u=(part + made.u) / self.timesteps)
            yield placed.pinned() if self.rank_slice.pin else placed, int(index < len(tasks)), part, batch.samples


def open_held_out_loss(
    session: Session,
    family: ModelFamily,
    state: TrainingState,
    prepared: Prepared,
    metrics: Metrics | None,
    verdict: Verdict,
    alarms: Callable[[], RunAlarms],
) -> HeldOutLoss:
    """Build what measures the loss on held-out images; `verdict` and `alarms` are told of each evaluation."""
    settings, validation, plan = session.settings, session.settings.validation, prepared.plan
    held_out = plan.held_out.tolist()
    watch = BestWatch(
        session.report,
        verdict,
        saves_best=settings.checkpoints.export_best,
        patience=validation.early_stopping_patience,
        images=len(plan.samples) - len(held_out),
        samples_per_step=settings.effective_batch_size,
        max_steps=state.schedule.max_steps,
        alarms=alarms,
    )
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
        group_of={index: number % PARTS for number, index in enumerate(held_out)},
        measured=digest_measured(settings, plan),
        watch=watch,
    )


def digest_measured(settings: Settings, plan: Plan) -> str:
    """Return a digest of images, noise and objective: losses with another one are not comparable."""
    names = [plan.samples[index].id for index in plan.held_out.tolist()]
    given = settings.objective.model_dump(mode="json")
    if not given["sound_loss_weight"]:
        del given["sound_loss_weight"]  # as runs have it that were begun before it was a setting
    objective = [settings.model.prediction_type, given]
    measured = [names, settings.training.seed, settings.validation.eval_timesteps, objective]
    return xxhash.xxh3_64_hexdigest(json.dumps(measured).encode())
