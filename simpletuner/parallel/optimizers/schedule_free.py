"""Schedule-free AdamW: no schedule to plan, since what is evaluated and saved is an average of all steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.parallel.optimizer_state import NewMoments, ShardAdamW, zero_moments
from simpletuner.parallel.torch_engine import ShardedParameter, TorchEngine
from simpletuner.settings.declared.sections import Optimizer


class ScheduleFreeAdamW(ShardAdamW):
    """AdamW by Defazio et al. 2024 (arXiv:2405.15682, algorithm 1).

    A parameter holds y, the point of the gradients; its state has z, moved by AdamW's steps. Both give x, the
    average of all z: y = (1 - beta1) z + beta1 x. Meta's package does the same, but counts steps for all
    parameters at once, and recomputes y from x after each evaluation, so that a run with evaluations or saves
    is not bit for bit the same as one without.
    """

    def new_moments(self, parameter: Tensor) -> NewMoments:
        y = parameter.detach()
        return zero_moments(y, "adamw_schedulefree") | {
            "y": lambda: y,  # the parameter's own memory, so that checkpoints, whose weights are x, hold it, too
            "z": y.clone,
            # float64: in float32 a sum over 100,000 steps is off by a part of each further weight
            "weight_sum": lambda: torch.zeros((), dtype=torch.float64),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        # One by one: torch's foreach functions would need all parameters' temporary tensors at once.
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        y = parameter
        state, rate, (beta1, beta2) = self.state[y], group["lr"], group["betas"]
        if not state:
            state |= {"step": torch.tensor(0.0), **{name: new() for name, new in self.new_moments(y).items()}}
        state["step"] += 1
        # Algorithm 1 weights each z by the square of its learning rate, so a warm-up counts for little.
        state["weight_sum"] += rate**2
        share = rate**2 / state["weight_sum"].item()
        z, square = state["z"], state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        direction = gradient / (square / (1 - beta2 ** state["step"].item())).sqrt_().add_(group["eps"])
        direction.add_(y, alpha=group["weight_decay"])
        # x moves to z by `share`, then z by a step: in terms of y and the z of before
        y.lerp_(z, share).add_(direction, alpha=rate * (beta1 * (1 - share) - 1))
        z.sub_(direction, alpha=rate)

    @torch.no_grad()
    def average(self, parameter: nn.Parameter) -> Tensor:
        """Return x, in new memory."""
        if not (state := self.state.get(parameter)):
            return parameter.detach().clone()
        (group,) = self.param_groups
        # x = (y - (1 - beta1) z) / beta1, by the definition of y.
        return torch.lerp(parameter.detach(), state["z"], 1 - 1 / group["betas"][0])


class ScheduleFreeEngine(TorchEngine):
    """A TorchEngine with parameters y, and the averages x as its weights in checkpoints."""

    optimizer: ScheduleFreeAdamW
    saves_views = False

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        for name, shard in super().local_shards():
            each = self.parameters.get(name)
            yield name, shard if each is None else self.optimizer.average(each.shard)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        # Gradients are freed by now, so the copies take no more memory than a step does. To compute y back
        # from x would round it.
        shards = [each.shard for each in self.parameters.values()]
        kept = [shard.detach().clone() for shard in shards]
        for shard in shards:
            shard.data.copy_(self.optimizer.average(shard))
        try:
            yield
        finally:
            for shard, values in zip(shards, kept, strict=True):
                shard.data.copy_(values)


def make_schedule_free(
    parameters: Mapping[str, ShardedParameter], settings: Optimizer, blocks: tuple[str, ...]
) -> ScheduleFreeAdamW:
    shards, rate = [each.shard for each in parameters.values()], settings.learning_rate
    return ScheduleFreeAdamW(shards, rate, settings.betas, settings.adam_epsilon, settings.adam_weight_decay)
