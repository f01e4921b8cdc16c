"""Muon: matrices step along their orthogonalized momentum, all other weights as AdamW has it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpletuner.parallel.model.blocks import is_hidden_matrix
from simpletuner.parallel.optimizer_state import NewMoments, ShardOptimizer, zero_moments
from simpletuner.parallel.torch_engine import ShardedParameter, whole_shape
from simpletuner.settings.declared.sections import Optimizer

MOMENTUM, ITERATIONS = 0.95, 5
# Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/: of the polynomial that is steepest at 0.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# Root mean square of an update, so that learning rate and weight decay of AdamW serve (Liu et al. 2025,
# arXiv:2502.16982, section 2.2).
UPDATE_RMS = 0.2


BATCH_ELEMENTS = 1 << 24
"""Of each rank in one batch, 32 MiB in bf16: what is larger than that fills a GPU by itself."""


class Muon(ShardOptimizer):
    """Take the steps of torch.optim.Muon with adjust_lr_fn="match_rms_adamw" for `matrices`, of AdamW for
    `others`.

    Momentum is sharded like the weights. Of a batch of matrices each rank orthogonalizes as many as the
    others: an all-to-all in bf16, the dtype of the computation, gathers them, and another one returns their
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
        ranks = self.ranks.size() if self.ranks is not None else 1
        for batch in batches([each.parameter.numel() for each in trained], ranks):
            matrices = trained[batch]
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
        """Orthogonalize a batch of matrices, given this rank's rows of each. Collective."""
        if self.ranks is None:
            return orthogonalize_all(rows)
        shapes = [each.parameter.shape for each in matrices]
        counts = [[count * columns for count in rows_of_ranks(length, self.ranks.size())] for length, columns in shapes]
        parts = orthogonalize_shared([each.flatten() for each in rows], shapes, counts, self.ranks)
        return [part.view_as(each) for part, each in zip(parts, rows, strict=True)]


def batches(sizes: Sequence[int], ranks: int) -> Iterator[slice]:
    """Cut matrices into batches of whole rounds, a matrix per rank: BATCH_ELEMENTS each, or one round."""
    start = 0
    while start < len(sizes):
        rounds = max(1, BATCH_ELEMENTS // sizes[start])
        yield slice(start, start + rounds * ranks)
        start += rounds * ranks


def orthogonalize_shared(
    parts: Sequence[Tensor], shapes: Sequence[torch.Size], counts: Sequence[Sequence[int]], ranks: dist.ProcessGroup
) -> Sequence[Tensor]:
    """Orthogonalize matrices, each on one rank, given this rank's elements (1-D) of each. Collective.

    `counts` has how many elements of each matrix every rank holds; together, in rank order, they are the
    whole matrix.
    """
    size, rank = ranks.size(), ranks.rank()
    if size == 1:
        found = orthogonalize_all([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
        return [matrix.flatten() for matrix in found]
    own = range(rank, len(parts), size)
    # There may be fewer matrices than ranks: those without one receive nothing, and still enter both
    # all-to-alls, which are collective.
    sent = [[len(part) for part in parts[other::size]] for other in range(size)]
    received = [[counts[index][other] for index in own] for other in range(size)]
    by_owner = [part for other in range(size) for part in parts[other::size]]
    pieces = exchange(torch.cat(by_owner), sent, received, ranks)
    whole = [torch.cat(each).view(shapes[index]) for index, each in zip(own, zip(*pieces, strict=True), strict=True)]
    cut = [each.flatten().split([*counts[index]]) for index, each in zip(own, orthogonalize_all(whole), strict=True)]
    by_holder = [each[other] for other in range(size) for each in cut]
    back = exchange(torch.cat(by_holder) if by_holder else parts[0].new_empty(0), received, sent, ranks)
    return [back[index % size][index // size] for index in range(len(parts))]


def exchange(
    flat: Tensor, sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]], ranks: dist.ProcessGroup
) -> list[Sequence[Tensor]]:
    """Send each rank its pieces of `flat`, and return the pieces from each rank. Collective."""
    to, of = [sum(each) for each in sent], [sum(each) for each in received]
    found = flat.new_empty(sum(of))
    dist.all_to_all_single(found, flat, of, to, group=ranks)
    return [part.split([*sizes]) for part, sizes in zip(found.split(of), received, strict=True)]


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


def orthogonalize_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalize bf16 matrices, those of one shape in one batch: a LoRA has hundreds of small ones."""
    of_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        of_shape.setdefault(matrix.shape, []).append(index)
    found = {}
    for indices in of_shape.values():
        found |= zip(indices, orthogonalize(torch.stack([matrices[index] for index in indices])), strict=True)
    return [found[index] for index in range(len(matrices))]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of bf16 matrices (n, rows, columns) by numbers near 1: five Newton-Schulz
    iterations."""
    # The iterations multiply Gram matrices of the short side: (768, 3072) takes a quarter of the work.
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalize(matrices.mT).mT
    a, b, c = COEFFICIENTS
    # Without instructions for bf16 (AVX2) a CPU takes 13 to 64 times as long in it, for 64 x 64 to 256 x 256.
    each = matrices.float() if matrices.device.type == "cpu" else matrices
    # The Frobenius norm bounds the largest singular value, and the iteration converges from [0, 1].
    each = each / each.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = each @ each.mT
        each = torch.baddbmm(each, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), each, beta=a)
    return each.to(matrices.dtype)


def make_muon(parameters: Mapping[str, ShardedParameter], settings: Optimizer, blocks: tuple[str, ...]) -> Muon:
    """Give Muon the hidden matrices of blocks, and AdamW the other weights."""
    hidden = {
        key for key, each in parameters.items() if is_hidden_matrix(key, len(whole_shape(each.parameter)), blocks)
    }
    others = [each for key, each in parameters.items() if key not in hidden]
    return Muon(
        [each for key, each in parameters.items() if key in hidden],
        others,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.adam_epsilon,
        weight_decay=settings.adam_weight_decay,
        fused=True,
    )
