"""The lowest ZeRO stage, and at it the least offloading, whose state fits the given memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.deepspeed.estimate import Estimate
from simpletuner.errors import SettingsError
from simpletuner.system.numbers import format_gib

PLACES = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme"))
"""Where optimizer state and weights go, from none of it to all of it."""


FREE_SHARE = 0.1
"""How much of a GPU a choice must leave for activations and for CUDA itself."""


@dataclass(frozen=True)
class Room:
    """How much memory there is; None where that is not known, and counts as enough."""

    gpu_bytes: int
    host_bytes: int | None = None

    def lacks(self, estimate: Estimate) -> str:
        """Return what an estimate needs more of than there is; empty if it fits."""
        if estimate.gpu_bytes > (1 - FREE_SHARE) * self.gpu_bytes:
            return f"{format_gib(estimate.gpu_bytes)} per GPU"
        if self.host_bytes is not None and estimate.host_bytes > self.host_bytes:
            return f"{format_gib(estimate.host_bytes)} of memory per machine"
        return ""


@dataclass(frozen=True)
class Choice:
    """The settings of DeepSpeed that were chosen, and why."""

    settings: dict[str, Any]
    because: str


def candidates(with_files: bool, fixed: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield what can be chosen, the lowest stage first, then the least offloading; below stage 3 weights stay.

    `fixed` holds what is not to be chosen any more.
    """
    for stage in (1, 2, 3):
        for optimizer, weights in PLACES:
            found = {"zero_stage": stage, "offload_optimizer": optimizer, "offload_param": weights}
            possible = stage == 3 or (optimizer != "nvme" and weights == "none")
            if possible and (with_files or "nvme" not in found.values()) and found == {**found, **(fixed or {})}:
                yield found


def choose(room: Room, possible: Iterable[dict[str, Any]], estimate_of: Callable[[dict[str, Any]], Estimate]) -> Choice:
    """Return the first possibility that fits. Raises SettingsError if none does."""
    passed: list[str] = []
    for settings in possible:
        estimate = estimate_of(settings)
        lack = room.lacks(estimate)
        if not lack:
            left = f"{format_gib(room.gpu_bytes - estimate.gpu_bytes)} are left for activations"
            before = f"; {'; '.join(passed)}" if passed else ""
            return Choice(settings, f"{in_words(settings)} fits {format_gib(room.gpu_bytes)} per GPU, {left}{before}")
        passed.append(f"{in_words(settings)} would need {lack}")
    raise SettingsError(
        f"nothing fits {format_gib(room.gpu_bytes)} per GPU: {'; '.join(passed)}",
        "use more GPUs (--num_processes), or name a disk with --offload_param_path",
    )


def in_words(settings: dict[str, Any]) -> str:
    """Return a choice as people say it."""
    parts = {"optimizer state": settings["offload_optimizer"], "weights": settings["offload_param"]}
    moved = [f"{what} on {place}" for what, place in parts.items() if place != "none"]
    return f"stage {settings['zero_stage']}{' with ' if moved else ''}{' and '.join(moved)}"
