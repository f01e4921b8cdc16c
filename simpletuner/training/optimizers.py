"""The optimizer, and the schedule of a run: its length in steps, and the learning rate, a function of the
step alone, so that a resumed run cannot differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.sampler.batch_sampler import GlobalBatchSampler, SamplerState
from simpletuner.errors import DataError
from simpletuner.parallel.optimizer_state import NewMoments, ShardOptimizer, zero_moments
from simpletuner.parallel.torch_engine import ShardedParameter, TorchEngine
from simpletuner.private_api import of_torch
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Optimizer


@dataclass(frozen=True)
class Schedule:
    """The last step, and the epochs that it comes from (None: max_train_steps).

    When the number of steps changes at a resume, with the effective batch or the data, progress continues
    from what it was at `start_step`, so that the learning rate does not jump.
    """

    max_steps: int
    epochs: int | None = None
    start_step: int = 0
    start_progress: float = 0.0
    planned_steps: int = 0
    """The last step as the run began, if it was another: the base of a warm-up given as a fraction."""

    def warmup_steps(self, optimizer: Optimizer) -> int:
        return optimizer.warmup_steps(self.planned_steps or self.max_steps)

    def progress(self, step: int, warmup_steps: int) -> float:
        """Return the share of the schedule after warm-up that is done before a step, from 0 to 1."""
        # Resumed after the warm-up: progress goes on from where it was, over the steps that are left.
        if self.start_step > warmup_steps:
            done = (step - self.start_step) / max(1, self.max_steps - self.start_step)
            return min(1.0, self.start_progress + (1 - self.start_progress) * done)
        return min(1.0, max(0, step - warmup_steps) / max(1, self.max_steps - warmup_steps))

    def as_json(self) -> dict[str, object]:
        start = {name: getattr(self, name) for name in ("start_step", "start_progress", "planned_steps")}
        return {"max_steps": self.max_steps, "schedule": {"epochs": self.epochs, **start}}


def new_schedule(settings: Settings, sampler: GlobalBatchSampler) -> Schedule:
    """Return the schedule of a new run. Raises DataError when there is nothing to train."""
    training = settings.training
    if training.max_train_steps is not None:
        return Schedule(training.max_train_steps)
    steps = sampler.count_steps(training.num_train_epochs, settings.effective_batch_size)
    if steps == 0:
        raise DataError("there is nothing to train: no bucket fills a batch", "raise num_train_epochs")
    return Schedule(steps, training.num_train_epochs)


def resumed_schedule(
    settings: Settings, sampler: GlobalBatchSampler, saved: Mapping[str, Any], position: SamplerState
) -> Schedule:
    """Return the schedule of a resumed run; `saved` is its checkpoint's state.

    Finished epochs stay finished; what is left of them is counted in steps of the present effective batch.
    """
    training, step = settings.training, int(saved["step"])
    if training.max_train_steps is not None:
        return Schedule(training.max_train_steps)
    before = saved_schedule(saved)
    epochs, total = training.num_train_epochs, step + sampler.count_steps_left(position, training.num_train_epochs)
    if total == before.max_steps:
        return replace(before, epochs=epochs)
    if before.epochs not in (epochs, None):  # the user asked for another length: the schedule stretches over it
        return Schedule(total, epochs)
    progress = before.progress(step, before.warmup_steps(settings.optimizer))
    return Schedule(total, epochs, step, progress, before.planned_steps or before.max_steps)


def saved_schedule(saved: Mapping[str, Any]) -> Schedule:
    return Schedule(saved["max_steps"], **saved["schedule"])


OWN: Mapping[str, str] = {
    "adafactor": "optimizers.adafactor:make_adafactor",
    "adamw_schedulefree": "optimizers.schedule_free:make_schedule_free",
    "muon": "optimizers.muon:make_muon",
    "prodigy": "optimizers.prodigy:make_prodigy",
}
"""Places below `parallel/` of optimizers that are neither torch's nor Lion: a run imports the one that it names."""
SPLIT = "precision.split_adamw:make_split_adamw"


def place_below_parallel(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"simpletuner.parallel.{module}"), name)


def engine_of(optimizer: str) -> type[TorchEngine]:
    """Return the class of the engine that steps an optimizer."""
    own = "optimizers.schedule_free:ScheduleFreeEngine" if optimizer == "adamw_schedulefree" else ""
    return place_below_parallel(own) if own else TorchEngine


def make_optimizer(
    parameters: Mapping[str, ShardedParameter], settings: Optimizer, blocks: tuple[str, ...] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer, fused where torch has it; `blocks` are the names of the denoiser's blocks.

    Sources: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), Adam (Kingma and Ba 2015, arXiv:1412.6980),
    Adagrad (Duchi et al. 2011); of the others, see there.
    """
    name = settings.optimizer
    if own := SPLIT if settings.state_layout != "fp32" else OWN.get(name):
        return place_below_parallel(own)(parameters, settings, blocks)
    rate, decay, epsilon = settings.learning_rate, settings.adam_weight_decay, settings.adam_epsilon
    shards, betas = [each.shard for each in parameters.values()], settings.betas
    if name == "lion":
        return Lion(shards, rate, betas, decay)
    if name == "adagrad":
        return torch.optim.Adagrad(shards, lr=rate, eps=epsilon, weight_decay=decay)
    adamw = {"lr": rate, "betas": betas, "eps": epsilon, "weight_decay": decay, "fused": True}
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(shards, **adamw)


class Lion(ShardOptimizer):
    """Step by the sign of an interpolated gradient mean (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def new_moments(self, parameter: Tensor) -> NewMoments:
        return zero_moments(parameter, "lion")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            trained: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            means = [self._mean(parameter) for parameter in trained]
            if trained:
                # Algorithm 2: the update is made with beta1, and only then the moment is renewed, with beta2.
                signs = of_torch.foreach_lerp(means, gradients, 1 - group["betas"][0])
                of_torch.foreach_sign_(signs)
                of_torch.foreach_mul_(trained, 1 - group["lr"] * group["weight_decay"])
                of_torch.foreach_add_(trained, signs, alpha=-group["lr"])
                of_torch.foreach_lerp_(means, gradients, 1 - group["betas"][1])

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
        state["step"] += 1
        return state["exp_avg"]


@dataclass(frozen=True)
class LearningRate:
    schedule: Schedule
    settings: Optimizer

    def at(self, step: int) -> float:
        """Return the learning rate of the optimizer step that follows `step` finished ones."""
        settings = self.settings
        peak, end, warm_up = settings.learning_rate, settings.lr_end, self.schedule.warmup_steps(settings)
        if step < warm_up:
            # The first step learns already, and the first one after the warm-up is the first with the peak.
            return peak * (step + 1) / (warm_up + 1)
        progress = self.schedule.progress(step, warm_up)
        remaining = {
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
            "polynomial": (1 - progress) ** settings.lr_power,
        }.get(settings.lr_scheduler)
        return peak if remaining is None else end + (peak - end) * remaining
