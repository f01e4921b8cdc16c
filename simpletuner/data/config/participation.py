"""Shares and times of datasets: weights, and the epochs and steps in which they take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.sections import DatasetSettings

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_types import ImageDataset

Copies = int | Fraction

# More steps or epochs than any run has.
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Window:
    """The steps and epochs, both counted from 0, in which a dataset takes part; the ends are excluded."""

    start_step: int = 0
    end_step: int = NO_LIMIT
    start_epoch: int = 0
    end_epoch: int = NO_LIMIT

    def contains(self, step: int, epoch: int) -> bool:
        return self.start_step <= step < self.end_step and self.start_epoch <= epoch < self.end_epoch


class ParticipationKeys(DatasetSettings):
    """Keys of a dataset about its share. Epochs count from 1; end_epoch and end_step are the last that have it."""

    probability: float = Field(default=1.0, gt=0, le=1_000_000)
    start_epoch: int = Field(default=1, ge=1)
    end_epoch: int | None = Field(default=None, ge=1)
    start_step: int = Field(default=0, ge=0)
    end_step: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def check_ends(self) -> ParticipationKeys:
        if (self.end_epoch or NO_LIMIT) < self.start_epoch:
            raise PydanticCustomError("end_epoch", "it is before start_epoch: the dataset would never take part")
        if (self.end_step or NO_LIMIT) <= self.start_step:
            raise PydanticCustomError("end_step", "it is not after start_step: the dataset would never take part")
        return self

    @property
    def window(self) -> Window:
        # Keys count epochs from 1 and name the last one; windows count from 0 and exclude their end, so
        # both ends are the same number.
        return Window(self.start_step, self.end_step or NO_LIMIT, self.start_epoch - 1, self.end_epoch or NO_LIMIT)


def copies_of(datasets: Sequence[ImageDataset]) -> list[Copies]:
    """Return how often an epoch shows the samples of each dataset; the largest probability in training is 1."""
    # Exact, and from the text: 0.1 as a float is no tenth, and copies of a group decide the order of samples.
    weights = [Fraction(str(dataset.probability)) for dataset in datasets]
    # Data of type eval is not trained on, so its probability must not scale that of the others.
    trained = [weight for dataset, weight in zip(datasets, weights, strict=True) if dataset.dataset_type != "eval"]
    largest = max(trained, default=Fraction(1))
    copies = [(1 + dataset.repeats) * weight / largest for dataset, weight in zip(datasets, weights, strict=True)]
    # Whole copies are int: their epochs are permuted independently, those of a fraction are parts of one row.
    return [each.numerator if each.denominator == 1 else each for each in copies]
