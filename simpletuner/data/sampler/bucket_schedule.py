"""The buckets at each step and epoch, where datasets come and go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from simpletuner.data.config.participation import NO_LIMIT, Window
from simpletuner.data.sampler.epoch_order import Bucket
from simpletuner.errors import SettingsError


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
        # Grouping reads all samples, and few sets of datasets are ever active together.
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
