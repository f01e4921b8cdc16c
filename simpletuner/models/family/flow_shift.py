"""The shift of noise levels with which a family's own scheduler samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from simpletuner.models.family.base import ModelFamily

ShiftOfShape = Callable[[Shape], float]
"""Takes a shape in latent cells."""


def sampling_shift(family: ModelFamily) -> ShiftOfShape:
    """Return the shift by shape as diffusers' pipeline and scheduler apply it, without `shift_terminal`.

    That stretches the last noise levels of a run of few steps; in training every level is drawn.
    """
    config = family.scheduler().config
    if not config.get("use_dynamic_shifting"):
        constant = config.get("shift") or config.get("flow_shift") or 1.0
        return lambda shape: constant
    is_exponential = config.get("time_shift_type", "exponential") == "exponential"

    def shift(shape: Shape) -> float:
        mu = family.shift_exponent(family.image_tokens(shape), config)
        return math.exp(mu) if is_exponential else mu

    return shift
