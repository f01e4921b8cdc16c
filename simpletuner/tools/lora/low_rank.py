"""Pairs of low-rank matrices, the best for a matrix (Eckart and Young 1936), by rank or by energy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from simpletuner.errors import SettingsError

# Rows or columns above which directions are sought at random: all of 3072 x 12288 take 30 CPU s, 64 take 5.
LARGE = 2048
# Directions beyond the rank, and rounds, of the search at random (Halko et al. 2011, algorithm 4.4).
MORE_DIRECTIONS, POWER_ITERATIONS = 32, 6


@dataclass(frozen=True)
class Wanted:
    """The rank of a result, or the share of a layer's squared sum that it keeps; `rank` then is the most."""

    rank: int | None
    energy: float | None

    @classmethod
    def of(cls, rank: int | None, energy: float | None) -> Wanted:
        """Raise SettingsError where neither is given, or an energy that is no share."""
        if rank is None and energy is None:
            raise SettingsError("neither --rank nor --energy is given", "try --rank=32, or --energy=0.95")
        return cls(rank, energy)

    def rank_of(self, squares: Tensor) -> int:
        """Rank for squared singular values, the largest first; one at least."""
        most = min(self.rank or len(squares), len(squares))
        if self.energy is None:
            return most
        kept = squares.cumsum(0) / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny)
        # A rounding of float64 below the share is the share.
        return max(1, min(most, int((kept < self.energy * (1 - 1e-12)).sum()) + 1))


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def best_pair(matrix: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Return (rank, inputs) and (outputs, rank) in float64 whose product is nearest to (outputs, inputs).

    By the eigenvectors of its product with itself in float64, which is what a singular value decomposition
    does at twice the work; values below 1e-8 of the largest are noise.
    """
    given = matrix.to(device_here(), torch.float64)
    small = min(given.shape)
    if small > LARGE and wanted.energy is None and wanted.rank is not None:
        count = min(small, wanted.rank + MORE_DIRECTIONS)
        basis, _, _ = torch.svd_lowrank(given, q=count, niter=POWER_ITERATIONS)
        down, up = largest_directions(basis.T @ given, wanted)
        up = basis @ up
    elif given.shape[0] > given.shape[1]:
        up, down = (each.T for each in largest_directions(given.T, wanted))
    else:
        down, up = largest_directions(given, wanted)
    balance = (down.norm(dim=1) / up.norm(dim=0)).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    return (down / balance[:, None]).cpu(), (up * balance).cpu()


def largest_directions(matrix: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Project a matrix, of no more rows than columns, on its largest left singular vectors."""
    squares, vectors = torch.linalg.eigh(matrix @ matrix.T)
    squares = squares.clamp_min(0).flip(0)
    up = vectors.flip(1)[:, : wanted.rank_of(squares)]
    return up.T @ matrix, up


def pair_of_product(down: Tensor, up: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    # The product's own size is never made.
    up_basis, up_rest = torch.linalg.qr(up.double())
    down_basis, down_rest = torch.linalg.qr(down.double().T)
    inner_down, inner_up = best_pair(up_rest @ down_rest.T, Wanted(wanted.rank, wanted.energy))
    return inner_down @ down_basis.T, up_basis @ inner_up
