"""The optimizer, and the learning rate as a function of the step alone, so that a resumed run cannot differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.model.blocks import block_paths
from simpletuner.parallel.model.module_stats import count_parameters
from simpletuner.parallel.moments import TrainedWeights
from simpletuner.parallel.optimizer_state import NewMoments, ShardOptimizer, zero_moments
from simpletuner.parallel.optimizers.adafactor import Adafactor
from simpletuner.parallel.optimizers.muon import Muon
from simpletuner.parallel.optimizers.prodigy import Prodigy
from simpletuner.parallel.optimizers.schedule_free import ScheduleFreeAdamW
from simpletuner.parallel.precision.split_adamw import SplitAdamW
from simpletuner.parallel.torch_engine import ShardedParameter, whole_shape
from simpletuner.private_api import of_torch
from simpletuner.settings.declared.sections import Optimizer
from simpletuner.training.schedule import Schedule


def make_optimizer(
    parameters: Mapping[str, ShardedParameter], settings: Optimizer, blocks: tuple[str, ...] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer, fused where torch has a fused one; `blocks` are the names of the denoiser's blocks.

    Sources: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), Adam (Kingma and Ba 2015, arXiv:1412.6980), Adagrad
    (Duchi et al. 2011); of the others, see there.
    """
    rate, decay, epsilon = settings.learning_rate, settings.adam_weight_decay, settings.adam_epsilon
    betas, name = (settings.adam_beta1, settings.adam_beta2), settings.optimizer
    shards = [each.shard for each in parameters.values()]
    if settings.state_layout != "fp32":
        return SplitAdamW(shards, rate, betas, epsilon, decay)
    if name == "lion":
        return Lion(shards, rate, betas, decay)
    if name == "adagrad":
        return torch.optim.Adagrad(shards, lr=rate, eps=epsilon, weight_decay=decay)
    if name == "adafactor":
        return Adafactor([*parameters.values()], rate, decay)
    if name == "prodigy":
        return Prodigy([*parameters.values()], rate, betas, epsilon, decay)
    if name == "adamw_schedulefree":
        return ScheduleFreeAdamW(shards, rate, betas, epsilon, decay)
    adamw = {"lr": rate, "betas": betas, "eps": epsilon, "weight_decay": decay, "fused": True}
    if name == "muon":
        hidden = [
            key for key, each in parameters.items() if is_hidden_matrix(key, len(whole_shape(each.parameter)), blocks)
        ]
        matrices = {key: parameters[key] for key in hidden}
        return Muon([*matrices.values()], [each for key, each in parameters.items() if key not in matrices], **adamw)
    return (torch.optim.Adam if name == "adam" else torch.optim.AdamW)(shards, **adamw)


def trained_weights(family: ModelFamily) -> TrainedWeights:
    """Return the shapes of what a run trains, as its optimizer is given them."""
    model, saved = family.meta_denoiser, {name: torch.Size(shape) for name, shape in family.trained_shapes().items()}
    trained, count = saved, sum(map(torch.Size.numel, saved.values()))
    if family.adapter is None:
        trained = {name: each.shape for name, each in model.named_parameters() if each.requires_grad}
    blocks = block_paths(model)
    shapes = [(tuple(shape), is_hidden_matrix(name, len(shape), blocks)) for name, shape in trained.items()]
    return TrainedWeights(shapes, count_parameters(model) if family.adapter is None else count, count)


def is_hidden_matrix(name: str, dimensions: int, blocks: tuple[str, ...]) -> bool:
    """Return whether a parameter is a linear layer's weight inside a block.

    Embeddings and the first and last layers are outside; tables of shifts and scales, though 2-D, are no `weight`.
    """
    is_inside = any(name.startswith(f"{block}.") for block in blocks)
    return is_inside and name.endswith(".weight") and dimensions == 2


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
    """The learning rate as a function of the step."""

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
