"""Muon over ZeRO's flat buffers of the weights: each matrix is gathered whole on one rank for its step.

DeepSpeed 0.19.8 has a Muon of its own (runtime/zero/muon), which scales updates and clips otherwise. This one
takes the steps of `parallel/optimizers/muon.py`, so that a run may change from one engine to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpletuner.deepspeed.partitions import ElementRange, OptimizerPartitions
from simpletuner.parallel.optimizer_state import NewMoments, ShardOptimizer, zero_moments
from simpletuner.parallel.optimizers.muon import Muon, batches, nesterov, orthogonalize_shared, update_scale
from simpletuner.parallel.torch_engine import whole_shape


@dataclass(frozen=True)
class MatrixPart:
    """This rank's elements of a matrix, from `offset` of a flat buffer; `counts` are those of all ranks."""

    offset: int
    shape: torch.Size
    counts: Sequence[int]

    def of(self, flat: Tensor) -> Tensor:
        return flat.narrow(0, self.offset, self.counts[dist.get_rank()])


class PartitionedMuon(ShardOptimizer):
    """Step a Muon whose parameters DeepSpeed replaces by flat buffers (1-D), one or more per group."""

    def __init__(self, muon: Muon) -> None:
        self.hidden, self.adamw = set[Tensor](muon.hidden), muon.adamw
        groups = [{**group, "hidden": group is muon.param_groups[0]} for group in muon.param_groups]
        super().__init__([group for group in groups if group["params"]], {})
        self.adamw.state = self.state
        self.matrices: dict[Tensor, list[MatrixPart]] = {}
        """Parts of matrices by flat buffer, in the same order on all ranks."""

    def new_moments(self, parameter: Tensor) -> NewMoments:
        return zero_moments(parameter, "muon", parameter in self.hidden)

    def find_matrices(
        self,
        partitions: OptimizerPartitions,
        ranges: Mapping[str, Sequence[ElementRange]],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Find the matrices in the flat buffers; `ranges` has the elements of every rank, by name."""
        for name, place, offset in partitions.places():
            if (parameter := parameters[name]) not in self.hidden:
                continue
            # At stages 1 and 2 all matrices are in one buffer, also those of which this rank has no element.
            flat = self.param_groups[0]["params"][0] if place is None else place
            self.hidden.add(flat)
            part = MatrixPart(offset, whole_shape(parameter), [each.numel for each in ranges[name]])
            self.matrices.setdefault(flat, []).append(part)
        for parts in self.matrices.values():
            # By size, as in parallel/optimizers/muon.py: ranks have equally much to do.
            parts.sort(key=lambda part: part.shape.numel(), reverse=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every flat buffer that has a gradient. Collective.

        DeepSpeed calls it per group or sub-group; meanwhile the groups hold only that one's buffers.
        """
        self.adamw.param_groups = [group for group in self.param_groups if not group["hidden"]]
        self.adamw.step()
        for group in self.param_groups:
            for flat in group["params"] if group["hidden"] else ():
                if flat.grad is not None:
                    self._update(flat, flat.grad, group)

    def _update(self, flat: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        update, matrices, ranks = nesterov(self.state[flat], gradient), self.matrices[flat], dist.group.WORLD
        assert ranks is not None
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        for cut in batches([part.shape.numel() for part in matrices], ranks.size()):
            batch = matrices[cut]
            shapes, counts = [part.shape for part in batch], [part.counts for part in batch]
            found = orthogonalize_shared([part.of(update) for part in batch], shapes, counts, ranks)
            for part, own in zip(batch, found, strict=True):
                part.of(flat).add_(own, alpha=-group["lr"] * update_scale(part.shape))
