"""Latents of reference images, as they stand among the conditioning of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import TypeVar

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

T = TypeVar("T")


def named_references(references: Iterable[T]) -> dict[str, T]:
    """Return references under the names that they have in conditioning."""
    return {f"reference.{number}": each for number, each in enumerate(references)}


def references_in(conditioning: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the latents of references, (B, C, H, W) each, in their order."""
    names = (f"reference.{number}" for number in count())
    found: list[Tensor] = []
    for name in names:
        if name not in conditioning:
            return found
        found.append(conditioning[name])
    return found


def pixels_of(image: Image) -> Tensor:
    """Return an image in RGB as training reads it, (1, 3, H, W) in -1..1."""
    return torch.from_numpy(np.asarray(image, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
