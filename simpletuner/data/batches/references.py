"""Latents of reference images, as they stand among the conditioning of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import Tensor

PREFIX = "reference."
FIRST_FRAME = "first_frame"
"""Name in conditioning of what a model is given of a clip's first frame."""

T = TypeVar("T")


def named_references(references: Iterable[T]) -> dict[str, T]:
    """Return references under the names that they have in conditioning."""
    return {f"{PREFIX}{number}": each for number, each in enumerate(references)}


def references_in(conditioning: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the latents of references, (B, C, H, W) each, in their order."""
    count = sum(name.startswith(PREFIX) for name in conditioning)
    return [conditioning[f"{PREFIX}{number}"] for number in range(count)]


def without_references(conditioning: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in conditioning.items() if not name.startswith(PREFIX)}
