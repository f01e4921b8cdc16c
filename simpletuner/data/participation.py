"""How much and when datasets are trained on: weights, and the epochs and steps in which they take part."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.errors import SettingsError
from simpletuner.settings.sections import DatasetSettings

if TYPE_CHECKING:
    from simpletuner.data.dataset_kinds import ImageDataset
    from simpletuner.data.epoch_order import Bucket

Copies = int | Fraction

NO_LIMIT = 1 << 62
"""More steps or epochs than any run has."""


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
        return Window(self.start_step, self.end_step or NO_LIMIT, self.start_epoch - 1, self.end_epoch or NO_LIMIT)


def copies_of(datasets: Sequence[ImageDataset]) -> list[Copies]:
    """Return how often an epoch shows the samples of each dataset; the largest probability in training is 1."""
    weights = [Fraction(str(dataset.probability)) for dataset in datasets]
    trained = [weight for dataset, weight in zip(datasets, weights, strict=True) if dataset.dataset_type != "eval"]
    largest = max(trained, default=Fraction(1))
    copies = [(1 + dataset.repeats) * weight / largest for dataset, weight in zip(datasets, weights, strict=True)]
    return [each.numerator if each.denominator == 1 else each for each in copies]


class BucketSchedule:
    """The buckets at each step and epoch: those of the datasets that take part.

    `make` groups the samples of some datasets, given whether each one takes part.
    """

    def __init__(self, windows: Sequence[Window], make: Callable[[tuple[bool, ...]], dict[str, Bucket]]) -> None:
        self.windows, self.make = windows, make
        self._made: dict[tuple[bool, ...], dict[str, Bucket]] = {}
        self.step_limits = sorted({limit for each in windows for limit in (each.start_step, each.end_step)})
        self.epoch_limits = sorted({limit for each in windows for limit in (each.start_epoch, each.end_epoch)})

    def active(self, step: int, epoch: int) -> tuple[bool, ...]:
        return tuple(window.contains(step, epoch) for window in self.windows)

    def buckets(self, step: int, epoch: int) -> dict[str, Bucket]:
        """Return the buckets by name, sorted. Raises SettingsError where no dataset takes part."""
        active = self.active(step, epoch)
        if self.windows and not any(active):
            raise SettingsError(
                f"no dataset takes part in step {step + 1} (epoch {epoch + 1})",
                "change start_epoch, start_step, end_epoch or end_step, or lower max_train_steps or num_train_epochs",
            )
        if active not in self._made:
            self._made[active] = dict(sorted(self.make(active).items()))
        return self._made[active]

    def next_step(self, step: int, epoch: int) -> int:
        """Return the first step after this one at which other datasets take part, in this epoch."""
        active, later = self.active(step, epoch), self.step_limits[bisect_right(self.step_limits, step) :]
        return next((limit for limit in later if self.active(limit, epoch) != active), NO_LIMIT)

    def next_epoch(self, epoch: int) -> int:
        """Return the first epoch after this one in which other datasets may take part."""
        return next((limit for limit in self.epoch_limits if limit > epoch), NO_LIMIT)
