"""Muon: matrices step along their orthogonalized momentum, all other weights as AdamW has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpletuner.parallel.optimizer_state import NewMoments, ShardOptimizer, zero_moments
from simpletuner.parallel.torch_engine import ShardedParameter

MOMENTUM, ITERATIONS = 0.95, 5
# Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/: of the polynomial that is steepest at 0.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# Root mean square of an update, so that learning rate and weight decay of AdamW serve (Liu et al. 2025,
# arXiv:2502.16982, section 2.2).
UPDATE_RMS = 0.2


class Muon(ShardOptimizer):
    """Take the steps of torch.optim.Muon with adjust_lr_fn="match_rms_adamw" for `matrices`, of AdamW for
    `others`.

    Momentum is sharded like the weights. Each rank orthogonalizes one matrix of a group of as many as there
    are ranks: an all-to-all in bf16, the dtype of the computation, gathers it, and another one returns its
    rows. So neither work nor memory is repeated, and results equal those for whole matrices.
    """

    def __init__(self, matrices: Sequence[ShardedParameter], others: Sequence[ShardedParameter], **adamw: Any) -> None:
        self.hidden = {each.shard for each in matrices}
        self.adamw = torch.optim.AdamW([{"params": [each.shard for each in others]}], **adamw)
        # In the order of `matrices`: ZeRO lays them out in it, and a set has another one on each rank.
        hidden = [{"params": [each.shard for each in matrices]}]
        super().__init__(hidden, {name: adamw[name] for name in ("lr", "weight_decay")})
        self.param_groups += self.adamw.param_groups
        self.adamw.state = self.state
        self.ranks = matrices[0].ranks if matrices else None
        # those of similar size together, so that ranks have equally much to do
        self.matrices = sorted(matrices, key=lambda each: each.parameter.numel(), reverse=True)

    def new_moments(self, parameter: Tensor) -> NewMoments:
        return zero_moments(parameter, "muon", parameter in self.hidden)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. Collective."""
        self.adamw.step()
        group, trained = self.param_groups[0], [each for each in self.matrices if each.shard.grad is not None]
        size = self.ranks.size() if self.ranks is not None else 1
        for start in range(0, len(trained), size):
            matrices = trained[start : start + size]
            updates = self._orthogonalized(matrices, [self._update(each.shard) for each in matrices])
            for each, update in zip(matrices, updates, strict=True):
                each.shard.mul_(1 - group["lr"] * group["weight_decay"])
                each.shard.add_(update, alpha=-group["lr"] * update_scale(each.parameter.shape))

    def _update(self, shard: nn.Parameter) -> Tensor:
        """Return Nesterov's momentum of this rank's rows, in bf16."""
        gradient = shard.grad
        assert gradient is not None
        return nesterov(self.state[shard], gradient)

    def _orthogonalized(self, matrices: Sequence[ShardedParameter], rows: list[Tensor]) -> list[Tensor]:
        """Orthogonalize at most one matrix per rank, given this rank's rows of each. Collective."""
        if self.ranks is None:
            return [orthogonalize(matrix) for matrix in rows]
        shapes = [each.parameter.shape for each in matrices]
        counts = [[count * columns for count in rows_of_ranks(length, self.ranks.size())] for length, columns in shapes]
        parts = orthogonalize_shared([each.flatten() for each in rows], shapes, counts, self.ranks)
        return [part.view_as(each) for part, each in zip(parts, rows, strict=True)]


def orthogonalize_shared(
    parts: Sequence[Tensor], shapes: Sequence[torch.Size], counts: Sequence[Sequence[int]], ranks: dist.ProcessGroup
) -> Sequence[Tensor]:
    """Orthogonalize at most one matrix per rank; takes and returns this rank's elements (1-D) of each.
    Collective.

    `counts` has how many elements of each matrix every rank holds; together, in rank order, they are the
    whole matrix.
    """
    size, rank = ranks.size(), ranks.rank()
    if size == 1:
        return [orthogonalize(parts[0].view(shapes[0])).flatten()]
    # In the last round there may be fewer matrices than ranks: those without one receive nothing, and still
    # enter both all-to-alls, which are collective.
    sent = [len(part) for part in parts] + [0] * (size - len(parts))
    received = counts[rank] if rank < len(parts) else [0] * size
    whole = parts[0].new_empty(sum(received))
    dist.all_to_all_single(whole, torch.cat([*parts]), [*received], sent, group=ranks)
    own = orthogonalize(whole.view(shapes[rank])) if rank < len(parts) else whole
    back = parts[0].new_empty(sum(sent))
    dist.all_to_all_single(back, own.flatten(), sent, [*received], group=ranks)
    return back.split(sent)[: len(parts)]


def nesterov(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Update a momentum, which is made where there is none, and return Nesterov's in bf16."""
    if not state:
        state |= {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(gradient)}
    state["step"] += 1
    momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
    return gradient.lerp(momentum, MOMENTUM).bfloat16()


def update_scale(shape: torch.Size) -> float:
    """Factor that gives a matrix' update the root mean square UPDATE_RMS."""
    return UPDATE_RMS * math.sqrt(max(shape))


def rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """Number of rows per rank of a DTensor with Shard(0)."""
    most = -(-rows // ranks)
    return [min(most, max(0, rows - most * rank)) for rank in range(ranks)]


def orthogonalize(matrix: Tensor) -> Tensor:
    """Replace the singular values of a bf16 matrix by numbers near 1: five Newton-Schulz iterations."""
    # The iterations multiply Gram matrices of the short side: (768, 3072) takes a quarter of the work.
    if len(matrix) > matrix.shape[1]:
        return orthogonalize(matrix.T).T
    a, b, c = COEFFICIENTS
    # The Frobenius norm bounds the largest singular value, and the iteration converges from [0, 1].
    matrix = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix
