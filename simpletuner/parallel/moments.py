"""State that each optimizer keeps of a weight, by shapes alone. No torch, so that commands can count before a
run.

The optimizers make their state from `moment_shapes`, and all estimates of memory and disk add it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]

# Moments that are the parameter itself: checkpoints hold them, memory does not hold them twice.
ALIASES = ("y",)


def moment_shapes(optimizer: str, shape: Shape, is_hidden_matrix: bool = False) -> dict[str, Shape]:
    """Return the shape of each moment that an optimizer keeps of a weight, or of a shard of it, by name.

    A moment of as many dimensions as its weight is cut into the same rows; any other is whole on every rank.
    """
    match optimizer:
        case "adafactor" if len(shape) >= 2:
            columns = shape[1:] if len(shape) == 2 else (*shape[:-2], 1, shape[-1])
            return {"row_var": (*shape[:-1], 1), "col_var": columns}
        case "adamw_schedulefree":
            return {"y": shape, "z": shape, "exp_avg_sq": shape, "weight_sum": ()}
        case "prodigy":
            four = dict.fromkeys(("exp_avg", "exp_avg_sq", "slope", "start"), shape)
            return {**four, "distance": (), "numerator": ()}
        case "adafactor":
            names = ("variance",)
        case "adagrad":
            names = ("sum",)
        case "lion":
            names = ("exp_avg",)
        case "muon" if is_hidden_matrix:
            names = ("momentum_buffer",)
        case "adam" | "adamw" | "muon":
            names = ("exp_avg", "exp_avg_sq")
        case _:
            raise ValueError(f"no optimizer is named {optimizer}")
    return dict.fromkeys(names, shape)


def needs_shapes(optimizer: str) -> bool:
    """True if the moments depend on the shapes of the weights, not only on their number."""
    return optimizer in ("adafactor", "muon")


@dataclass(frozen=True)
class TrainedWeights:
    """The weights given to an optimizer, and the number of elements in the weights of a checkpoint."""

    shapes: Sequence[tuple[Shape, bool]]
    """Shape of each weight, and True if Muon orthogonalizes its update (hidden matrices)."""
    num_parameters: int
    num_saved: int
    """Parameters and buffers, those that are not trained included."""

    @classmethod
    def of_count(cls, num_parameters: int) -> TrainedWeights:
        """Weights of known number only: exact, or an upper bound for optimizers that need shapes."""
        return cls([((num_parameters,), False)], num_parameters, num_parameters)

    @property
    def num_unused(self) -> int:
        """Parameters that no prediction depends on, which an optimizer is not given."""
        return self.num_parameters - sum(prod(shape) for shape, _ in self.shapes)

    def held_states(self, optimizer: str, ranks: int) -> float:
        """Values of optimizer state per weight of a rank's share."""
        sizes = [
            prod(moment) * (1 if len(moment) == len(shape) else ranks)
            for shape, is_hidden in self.shapes
            for name, moment in moment_shapes(optimizer, shape, is_hidden).items()
            if name not in ALIASES
        ]
        return sum(sizes) / self.num_parameters

    def saved_states(self, optimizer: str) -> int:
        """Values of optimizer state per weight in a checkpoint, over all ranks."""
        return sum(prod(m) for each in self.shapes for m in moment_shapes(optimizer, *each).values())
