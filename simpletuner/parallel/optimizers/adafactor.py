"""Adafactor over row shards: sums over all rows of a weight are taken over the ranks that share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpletuner.parallel.optimizer_state import NewMoments, ShardOptimizer, zero_moments
from simpletuner.parallel.torch_engine import ShardedParameter
from simpletuner.settings.declared.sections import Optimizer

BETA2_DECAY, SMALLEST_RMS, CLIP = -0.8, 1e-3, 1.0
"""Gamma, epsilon2 and d of the paper."""

EPSILON = torch.finfo(torch.float32).eps


class Adafactor(ShardOptimizer):
    """Take the steps of torch.optim.Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), which are relative
    to the root mean square of each weight. torch's own would take the rows of a rank for the whole weight.

    A rank holds `row_var` of its own rows, and `col_var` of a matrix as one vector, the same on all ranks. Of
    convolutions the last two dimensions are factored, which are whole on each rank.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], lr: float, weight_decay: float) -> None:
        super().__init__([each.shard for each in parameters], {"lr": lr, "weight_decay": weight_decay})
        self.shapes = {each.shard: each.parameter.shape for each in parameters}
        self.ranks = parameters[0].ranks

    def new_moments(self, parameter: Tensor) -> NewMoments:
        return zero_moments(parameter, "adafactor")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. Collective: two reductions of small tensors.

        Updates are computed twice, rather than held for all parameters at once.
        """
        (group,) = self.param_groups
        trained = [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
        sums = self._over_ranks([self._follow_rows(*each) for each in trained])
        for (parameter, _), total in zip(trained, sums, strict=True):
            self._follow_columns(parameter, total)
        updates = [(parameter, gradient, total) for (parameter, gradient), total in zip(trained, sums, strict=True)]
        squares = self._over_ranks([self._update(*each).square_().sum()[None] for each in updates])
        for (parameter, gradient, total), square in zip(updates, squares, strict=True):
            count = self.shapes[parameter].numel()
            # Algorithm 4: rho = min(1e-2, t^-0.5), here with learning_rate for 1e-2,
            # times max(epsilon2, RMS(X)).
            rate = min(group["lr"], self.state[parameter]["step"].item() ** -0.5)
            scale = rate * (total[0] / count).sqrt().clamp_(min=SMALLEST_RMS)
            # Update clipping: U / max(1, RMS(U) / d).
            scale /= ((square[0] / count).sqrt() / CLIP).clamp_(min=1)
            update = self._update(parameter, gradient, total)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(scale))

    def _follow_rows(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Update what a rank has of its own rows, and return the sums that are to be taken over all rows.

        They are the sums of the weight's squares, of `row_var`, and of the columns of the gradient's squares:
        (2 + N,), or (1,) for a weight that is not a matrix.
        """
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.tensor(0.0), **{name: new() for name, new in self.new_moments(parameter).items()}}
        state["step"] += 1
        weight, squares = self._newest(parameter), gradient.square()
        size = parameter.square().sum()[None]
        if parameter.dim() < 2:
            state["variance"].lerp_(squares, weight)
            return size
        state["row_var"].lerp_(squares.mean(-1, keepdim=True), weight)
        if parameter.dim() == 2:
            return torch.cat([size, state["row_var"].sum()[None], squares.sum(0)])
        state["col_var"].lerp_(squares.mean(-2, keepdim=True), weight)
        return size

    def _follow_columns(self, parameter: nn.Parameter, sums: Tensor) -> None:
        if parameter.dim() == 2:
            means = sums[2:] / self.shapes[parameter][0]
            self.state[parameter]["col_var"].lerp_(means, self._newest(parameter))

    def _newest(self, parameter: nn.Parameter) -> float:
        """Return the weight of the newest gradient in the moments."""
        # 1 - beta2 of algorithm 4, where beta2 = 1 - t^-0.8; at step 1 the moments are the gradient's.
        return self.state[parameter]["step"].item() ** BETA2_DECAY

    def _update(self, parameter: nn.Parameter, gradient: Tensor, sums: Tensor) -> Tensor:
        """Return the gradient over the root of its estimated mean square, in new memory."""
        state = self.state[parameter]
        if parameter.dim() < 2:
            square = state["variance"].clone()
        else:
            is_matrix, rows = parameter.dim() == 2, state["row_var"]
            mean = sums[1] / self.shapes[parameter][0] if is_matrix else rows.mean(-2, keepdim=True)
            square = rows @ (state["col_var"][None] if is_matrix else state["col_var"])
            square /= mean.clamp(min=EPSILON)
        return square.clamp_(min=EPSILON**2).rsqrt_().mul_(gradient)

    def _over_ranks(self, parts: list[Tensor]) -> Sequence[Tensor]:
        """Add up tensors (N,) over the ranks. Collective where they share rows."""
        if self.ranks is None or not parts:
            return parts
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=self.ranks)
        return flat.split([len(part) for part in parts])


def make_adafactor(
    parameters: Mapping[str, ShardedParameter], settings: Optimizer, blocks: tuple[str, ...]
) -> Adafactor:
    return Adafactor([*parameters.values()], settings.learning_rate, settings.adam_weight_decay)
