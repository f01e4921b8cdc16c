"""Callbacks after a round of validation: the report is renewed, a message is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simpletuner.settings import Settings


@dataclass(frozen=True)
class RoundEnd:
    """Calls functions with the step, after the other evaluations of a round; they must return at once."""

    actions: Sequence[Callable[[int], None]]
    """Empty on ranks above 0."""
    interval: int
    title: str = "reporting"

    def count(self, step: int) -> int:
        return 1

    def run(self, step: int, advance: Callable[[int], None]) -> None:
        for action in self.actions:
            action(step)
        advance(1)

    def is_complete(self, step: int) -> bool:
        return True


def at_round_ends(settings: Settings, actions: Sequence[Callable[[int], None]]) -> RoundEnd:
    """Return what calls functions with each round of validation images; without prompts, with each checkpoint."""
    every = settings.validation.validation_step_interval if settings.validation.samples_images else 0
    return RoundEnd(actions, every or settings.checkpoints.checkpoint_step_interval)
