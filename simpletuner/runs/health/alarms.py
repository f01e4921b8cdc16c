"""Alarms: faults of a run that do not end it, seen in numbers that it measures anyway. No torch.

Each check takes the rows of a run in order and returns an alarm where its fault occurs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from simpletuner.runs.health.best_step import Measured
from simpletuner.system.numbers import count_noun


@dataclass(frozen=True)
class Alarm:
    """A fault: the name of its check, a sentence with the numbers, and what to do."""

    name: str
    sentence: str
    hint: str


Row = Mapping[str, Any]
"""Of metrics.jsonl."""
WINDOW = 100
"""Steps whose median is compared with that of the best ones."""
EVERY = 20
"""Steps between two comparisons."""
SLOWER = 1.5
# Steps of a shape whose median is what such a step takes; the first ones compile.
OF_SHAPE = 10


class StepTimes:
    """Steps that take longer than before: medians of WINDOW, each relative to the first steps of its shape.

    Without that a run of two resolutions would be slower whenever it draws more of the larger one.
    """

    name = "step time"

    def __init__(self) -> None:
        self.first: dict[Hashable, list[float]] = {}
        self.last: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        """Relative time, seconds, and seconds of them that were spent waiting for data."""
        self.best: tuple[float, float, float] | None = None
        """Of the best WINDOW: median relative time, median seconds, and the share of waiting."""
        self.added = 0

    def add(self, row: Row, shape: Hashable) -> Alarm | None:
        """Take a step; `shape` is equal for steps that have as much to compute."""
        first = self.first.setdefault(shape, [])
        if len(first) < OF_SHAPE:
            first.append(row["seconds"])
            return None
        usual = median(first) or 1e-9
        self.last.append((row["seconds"] / usual, row["seconds"], row["data_seconds"]))
        self.added += 1
        if len(self.last) < WINDOW or self.added % EVERY:
            return None
        relative, seconds, waited = zip(*self.last, strict=True)
        now = median(relative), median(seconds), sum(waited) / (sum(seconds) or 1.0)
        if self.best is None or now[0] < self.best[0]:
            self.best = now
        return self.slow(now, self.best) if now[0] > SLOWER * self.best[0] else None

    def slow(self, now: tuple[float, float, float], best: tuple[float, float, float]) -> Alarm:
        waits = f"; waiting for data takes {now[2]:.0%} of the time, before {best[2]:.0%}" * (now[2] - best[2] > 0.1)
        return Alarm(
            self.name,
            f"steps take {now[0] / best[0]:.1f} times as long as before: {now[1]:.3g} s (median of the last {WINDOW}), "
            f"{best[1]:.3g} s in the best {WINDOW}{waits}",
            "docs/performance.md says what slows steps; profile_steps shows where the time goes",
        )


GRADIENT_WINDOW = 20
# Windows of a run that say what is usual.
USUAL_WINDOWS = 5
VANISHED, EXPLODED = 1e-4, 100.0
"""Factors between the norm that is usual in a run and that of its last steps."""


class GradientNorms:
    """Gradients that vanish or explode: the median norm of GRADIENT_WINDOW steps against all such before."""

    name = "gradients"

    def __init__(self) -> None:
        self.window: list[float] = []
        self.medians: list[float] = []

    def add(self, row: Row, shape: Hashable) -> Alarm | None:
        self.window.append(row["grad_norm"])
        if len(self.window) < GRADIENT_WINDOW:
            return None
        now, self.window = median(self.window), []
        usual = median(self.medians) if len(self.medians) >= USUAL_WINDOWS else None
        self.medians.append(now)
        if now == 0 or (usual is not None and now < VANISHED * usual):
            what, hint = (
                "vanish",
                "what is trained is cut off from the loss, or the loss is 0: look at images and masks",
            )
        elif usual is not None and now > EXPLODED * usual:
            what, hint = "explode", "lower learning_rate, or max_grad_norm; go on from a checkpoint before"
        else:
            return None
        before = f", before {usual:.3g}" if usual is not None else ""
        steps = f"the norm before clipping is {now:.3g} (median of the last {GRADIENT_WINDOW} steps{before})"
        return Alarm(self.name, f"gradients {what}: {steps}", hint)


LEAST_STEPS = 50
"""Steps in which any training that has an effect has changed the loss."""
SAME = 1e-3
"""Relative difference of losses of equal inputs, below which the model is what it was."""


def find_unchanged(measured: Sequence[Measured], max_steps: int) -> Alarm | None:
    """Return the alarm of a held-out loss that is still the base model's after a tenth of the run.

    The same images, noise and noise levels give the same loss, so the lack of an effect is seen exactly.
    """
    last = measured[-1] if measured else None
    if last is None or last.step < max(LEAST_STEPS, max_steps / 10):
        return None
    base = next((each for each in measured if each.step == 0 and each.name == last.name), None)
    if base is None:
        return None
    pairs = [(base.loss, last.loss), *zip(base.parts, last.parts, strict=False)]
    if any(abs(before - after) > SAME * abs(before) for before, after in pairs):
        return None
    return Alarm(
        "as the base model",
        f"after {last.step:,} steps the held-out loss is still the base model's ({base.loss:.4f}), for all images: "
        "training has no effect",
        "raise learning_rate; a LoRA takes about ten times the rate of a full run",
    )


# Steps of a run below which it is a trial: nobody expects that it trains on all images.
TRIAL_STEPS = 100


def find_not_drawn(images: int, batch: int, steps: int) -> Alarm | None:
    """Return the alarm of a run whose `steps` draw fewer samples than it has images."""
    samples = batch * steps
    if samples >= images or steps < TRIAL_STEPS:
        return None
    return Alarm(
        "not drawn",
        f"at least {count_noun(images - samples, 'image')} of {images:,} will never be drawn: this run takes "
        f"{count_noun(samples, 'sample')}",
        "raise max_train_steps or train_batch_size to train on all",
    )


def find_without_gradient(names: Sequence[str], count: int, steps: int) -> Alarm | None:
    """Return the alarm of trained weights, `count` in all, of which some had no gradient in some steps."""
    if not names:
        return None
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return Alarm(
        "no gradient",
        f"{len(names)} of {count_noun(count, 'trained weight')} had no gradient in {steps} steps: {shown}",
        "nothing trains them: leave them out of lora_target_modules, or look at the forward pass of the model",
    )
