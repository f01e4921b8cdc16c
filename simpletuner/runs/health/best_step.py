"""The best step of a run by the loss on held-out images, from the rows of `metrics.jsonl`. No torch.

All losses of a run are those of the same images, noise and noise levels, so two steps are compared image by
image: the mean difference of their losses, and its standard error over PARTS of the images (random groups:
Wolter 2007, Introduction to Variance Estimation, chapter 2). A step is better where zero is below the 95 %
interval of the difference, by Student's t: of two groups that is 12.7 standard errors, of sixteen 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

from simpletuner.errors import SimpleTunerError
from simpletuner.runs.metrics import HELD_OUT, LEVEL_OF, LEVELS, MAX_BYTES, METRICS, rows_in
from simpletuner.system.files.regular_files import open_regular
from simpletuner.system.numbers import count_noun

# Groups of held-out images; fewer where there are fewer images.
PARTS = 16
# Two-sided 95 % points of Student's t distribution, for 1 to PARTS - 1 degrees of freedom.
STUDENT_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
# Evaluations in a row above the best one, after which a run says so.
RISES = 3
WEIGHTS: Mapping[str, str] = dict(zip(HELD_OUT, ("trained", "ema"), strict=True))
# Names in a row: of the mean losses of the groups, and of a digest of what is measured. Losses of other
# images, or at other noise levels, are not compared.
PARTS_OF, SET = "{}_parts", "eval_set"


@dataclass(frozen=True)
class Measured:
    """The held-out loss of one set of weights at one step."""

    step: int
    name: str
    """Name of the loss in the metrics, which says whose weights it is of."""
    loss: float
    parts: tuple[float, ...] = ()
    """Mean losses of the groups of images; empty in rows of earlier versions."""
    levels: tuple[float, ...] = ()
    """Mean losses by range of noise levels, least noise first; empty where one range is measured."""

    @property
    def weights(self) -> str:
        return WEIGHTS[self.name]

    def spread_to(self, other: Measured) -> float:
        """Half the 95 % interval of the difference to another loss; 0 where unknown, as of one image."""
        count = len(self.parts)
        if not 2 <= count <= PARTS or count != len(other.parts):
            return 0.0
        differences = [mine - theirs for mine, theirs in zip(self.parts, other.parts, strict=True)]
        return STUDENT_T[count - 2] * stdev(differences) / math.sqrt(count)

    def is_below(self, other: Measured) -> bool:
        """True for a lower loss, by more than the spread of the measure."""
        return self.loss < other.loss - self.spread_to(other)

    def difference_to(self, other: Measured) -> str:
        """Return the difference with its spread, as in `0.0112 ± 0.0031`."""
        spread = self.spread_to(other)
        return f"{abs(self.loss - other.loss):.4f}" + f" ± {spread:.4f}" * (spread > 0)


@dataclass(frozen=True)
class BestStep:
    """The best of what was measured, and what was measured after it with the same weights."""

    best: Measured
    since: Sequence[Measured] = ()

    @property
    def above(self) -> int:
        """Number of the last evaluations in a row whose loss is above the best by more than the spread."""
        not_above = (number for number, each in enumerate(reversed(self.since)) if not self.best.is_below(each))
        return next(not_above, len(self.since))

    @property
    def has_risen(self) -> bool:
        return self.above >= RISES

    def describe(self) -> str:
        """Say in one line what the best step is, and how the last one compares."""
        average = " of the EMA" * (self.best.weights == "ema")
        which = f"step {self.best.step:,}" if self.best.step else "the base model, before the first step"
        said = f"{which}: {self.best.loss:.4f}{average}"
        if not self.since:
            return said
        last = self.since[-1]
        if not self.best.is_below(last):
            return f"{said}; step {last.step:,} does not differ ({last.loss:.4f})"
        rises = f", as in {count_noun(self.above, 'evaluation')} in a row" if self.has_risen else ""
        return f"{said}; at step {last.step:,} it is higher by {last.difference_to(self.best)}{rises}"

    def most_overfitted(self) -> str:
        """Name the range of noise levels whose loss has risen most, in percent; empty where not known."""
        last = self.since[-1] if self.since else self.best
        pairs = [*zip(self.best.levels, last.levels, strict=False)]
        if len(pairs) < 2 or not all(before > 0 for before, _ in pairs):
            return ""
        rises = [after / before - 1 for before, after in pairs]
        most = max(range(len(rises)), key=rises.__getitem__)
        where = {0: "at the least noise", len(rises) - 1: "at the most noise"}
        return f"{where.get(most, f'in part {most + 1} of {len(rises)} of the noise levels')} ({rises[most]:+.0%})"


def find_best(measured: Sequence[Measured]) -> BestStep | None:
    """Return the best step: each that beats the best before it takes its place. None without any loss.

    So a step that is lower by chance is not the best, and later readers see no other order.
    """
    best: Measured | None = None
    for each in measured:
        if best is None or each.is_below(best):
            best = each
    if best is None:
        return None
    return BestStep(best, [each for each in measured if each.step > best.step and each.name == best.name])


def best_saved(measured: Sequence[Measured], steps: Collection[int]) -> Measured | None:
    """Return the best of the steps that have a checkpoint; None where none of them was measured.

    It is the best step, or where that has none, the one with the lowest loss: of whatever steps are there,
    and whoever has removed others before.
    """
    found = find_best(measured)
    if found is not None and found.best.step in steps:
        return found.best
    return min((each for each in measured if each.step in steps), key=lambda each: each.loss, default=None)


def read_measured(output: Path) -> list[Measured]:
    """Return the held-out losses of a run in their order, of what it measured last.

    Torn or damaged lines, losses that are not finite, and unreadable files are left out.
    """
    rows: list[dict[str, Any]] = []
    try:
        with open_regular(output / METRICS, MAX_BYTES) as file:
            for line in file:
                if b'"eval_loss' in line:  # one row in some hundred: only these are parsed
                    rows += rows_in(line)
    except (OSError, SimpleTunerError):
        return []
    found = [(row.get(SET), list(losses_in(row))) for row in rows]
    last = next((what for what, losses in reversed(found) if losses), None)
    return [each for what, losses in found if what == last for each in losses]


def losses_in(row: dict[str, Any]) -> Iterator[Measured]:
    for name in HELD_OUT:
        for loss in floats_in([row.get(name)]):
            parts = floats_in(row.get(PARTS_OF.format(name)))
            yield Measured(int(row["step"]), name, loss, parts, levels_in(row, name))


def levels_in(row: dict[str, object], name: str) -> tuple[float, ...]:
    for count in range(LEVELS, 1, -1):
        if (first := row.get(LEVEL_OF.format(name, 1, count))) is not None:
            rest = (row.get(LEVEL_OF.format(name, number, count)) for number in range(2, count + 1))
            return floats_in([first, *rest])
    return ()


def floats_in(values: object) -> tuple[float, ...]:
    """Return a list of finite numbers; nothing of anything else."""
    if not isinstance(values, list) or not all(type(each) in (float, int) and abs(each) < 1e300 for each in values):
        return ()
    return tuple(map(float, values))


def find_best_of(output: Path) -> BestStep | None:
    """Return the best step of the run in a folder; None where it has measured no held-out loss."""
    return find_best(read_measured(output))


def best_saved_of(output: Path, steps: Collection[int]) -> int | None:
    """Return the best of the steps that have a checkpoint, of the run in a folder."""
    found = best_saved(read_measured(output), steps)
    return found.step if found is not None else None
