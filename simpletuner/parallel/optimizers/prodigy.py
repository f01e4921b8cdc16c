"""Prodigy over row shards: it finds the learning rate by sums over all weights, which ranks add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpletuner.parallel.optimizer_state import NewMoments, ShardOptimizer, zero_moments
from simpletuner.parallel.torch_engine import ShardedParameter
from simpletuner.settings.declared.sections import Optimizer

# d_0 of the paper, which says that any small value will do: it grows within some hundred steps.
FIRST_DISTANCE = 1e-6


class Prodigy(ShardOptimizer):
    """Adam whose learning rate is multiplied by an estimate of the distance to the solution (Mishchenko and
    Defazio 2023, arXiv:2306.06101, algorithm 4), with AdamW's decoupled weight decay.

    `distance` (d) and `numerator` (r) are one number for all weights, held as a moment of each, and `slope`
    is s.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        shards = [each.shard for each in parameters]
        super().__init__(shards, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.ranks = parameters[0].ranks

    def new_moments(self, parameter: Tensor) -> NewMoments:
        return zero_moments(parameter, "prodigy") | {
            "start": lambda: parameter.detach().clone(),
            "distance": lambda: parameter.new_full((), FIRST_DISTANCE, dtype=torch.float32),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. Collective: one reduction of two numbers.

        Nothing waits for the GPU: the distance stays on it.
        """
        (group,) = self.param_groups
        trained = [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
        if not trained:
            return
        states = [self._state(parameter) for parameter, _ in trained]
        distance, numerator = states[0]["distance"], states[0]["numerator"]
        decay, rate = group["betas"][1] ** 0.5, group["lr"]
        share = (1 - decay) * rate * distance**2
        sums = [
            self._accumulate(parameter, gradient, state, decay, share)
            for (parameter, gradient), state in zip(trained, states, strict=True)
        ]
        products, slopes = self._over_ranks(torch.stack(sums).sum(0))
        for (parameter, gradient), state in zip(trained, states, strict=True):
            self._update(parameter, gradient, state, group, distance)
        numerator.mul_(decay).add_(share * products)
        # Without a gradient yet there is no estimate. d never shrinks.
        estimate = torch.where(slopes > 0, numerator / slopes, torch.zeros_like(slopes))
        torch.maximum(distance, estimate, out=distance)
        for state in states[1:]:  # which a checkpoint has read as numbers of their own
            state |= {"distance": distance, "numerator": numerator}

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.tensor(0.0), **{name: new() for name, new in self.new_moments(parameter).items()}}
        state["step"] += 1
        return state

    @staticmethod
    def _accumulate(parameter: Tensor, gradient: Tensor, state: dict[str, Any], decay: float, share: Tensor) -> Tensor:
        """Add a gradient to s; return this rank's share of <g, x_0 - x> and of the L1 norm of s: (2,)."""
        slope = state["slope"].mul_(decay).add_(gradient * share)
        return torch.stack([(gradient * (state["start"] - parameter)).sum(), slope.abs().sum()])

    @staticmethod
    def _update(
        parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], distance: Tensor
    ) -> None:
        (beta1, beta2), scaled = group["betas"], gradient * distance
        mean = state["exp_avg"].mul_(beta1).add_(scaled, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        rate = distance * group["lr"]
        update = (mean / square.sqrt().add_(distance * group["eps"])).add_(parameter, alpha=group["weight_decay"])
        # One subtraction: `1 - rate * weight_decay` in float32 is 1 below 3e-8, as it is until d has grown.
        parameter.sub_(update.mul_(rate))

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """Add up over the ranks. Collective where they share rows."""
        if self.ranks is not None:
            dist.all_reduce(sums, group=self.ranks)
        return sums


def make_prodigy(parameters: Mapping[str, ShardedParameter], settings: Optimizer, blocks: tuple[str, ...]) -> Prodigy:
    rate, decay = settings.learning_rate, settings.adam_weight_decay
    return Prodigy([*parameters.values()], rate, settings.betas, settings.adam_epsilon, decay)
