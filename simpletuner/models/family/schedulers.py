"""Noise levels of a family's scheduler: the shift that it samples with and trains with, and the proof that
both agree.

The proof: exact predictions lead the scheduler's own steps to known latents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simpletuner.models.catalog.preset import Preset
from simpletuner.models.catalog.registry import AUTO, is_own, preset_of, presets, published_shift
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

    from simpletuner.models.family.base import ModelFamily

ShiftOfShape = Callable[[Shape], float]
"""Takes a shape in latent cells."""


def sampling_shift(family: ModelFamily) -> ShiftOfShape:
    """Return the shift by shape as diffusers' pipeline and scheduler apply it, without `shift_terminal`.

    That stretches the last noise levels of a run of few steps; in training every level is drawn.
    """
    config = family.scheduler().config
    if not (config.get("use_dynamic_shifting") or family.shifts_levels):
        constant = config.get("shift") or config.get("flow_shift") or 1.0
        return lambda shape: constant
    is_exponential = config.get("time_shift_type", "exponential") == "exponential"

    @lru_cache  # of model_family=auto it is a run of the pipeline
    def shift(shape: Shape) -> float:
        mu = family.mu(shape, config)
        return math.exp(mu) if is_exponential else mu

    return shift


def training_shift(family: ModelFamily) -> float | ShiftOfShape:
    """Return the shift of noise levels in training: that of the settings, or of the published scheduler.

    Images have the shift of 1024 px, the same for all sizes. Clips have the shift of their own tokens if a
    scheduler or the preset counts them: a clip of 121 frames has up to thirteen times the tokens of an image,
    and is sampled at levels above 0.9. Without a preset for the pipeline, images have the shift of their
    tokens, too.
    """
    own, sampled, preset = family.settings.objective, sampling_shift(family), published_preset(family)
    if own.flow_schedule_shift is not None:
        return own.flow_schedule_shift
    image = image_shift(family, preset, sampled) if preset and not own.flow_schedule_auto_shift else 0
    if preset is None or not image:
        return sampled
    is_dynamic, numbers = family.scheduler().config.get("use_dynamic_shifting"), preset.clip_shift
    if not preset.frame_step or not (is_dynamic or numbers):
        return image

    def shift(shape: Shape) -> float:
        if shape.frames == 1:
            return image
        return sampled(shape) if is_dynamic else math.exp(family.shift_exponent(family.image_tokens(shape), numbers))

    return shift


def published_preset(family: ModelFamily) -> Preset | None:
    """Preset of a family; for model_family=auto of the built-in family with the same pipeline."""
    model, pipeline = family.settings.model, family.index.get("_class_name")
    if model.model_family == AUTO and not is_own(model):
        return next((each for each in presets().values() if pipeline in each.pipelines), None)
    return preset_of(model)


def image_shift(family: ModelFamily, preset: Preset, sampled: ShiftOfShape) -> float:
    """Shift of a scheduler at 1024 px; 0 if the preset has none.

    Without a model_flavour, a constant in the folder tells: FLUX.1-schnell has 1, where dev has 3.158. That
    of a family with `clip_shift` does not: LTXConditionPipeline gives its scheduler levels of its own.
    """
    is_dynamic = family.scheduler().config.get("use_dynamic_shifting") or family.shifts_levels
    if preset.flow_shift and not (family.settings.model.model_flavour or is_dynamic or preset.clip_shift):
        return sampled(Shape(1, 1, 1))
    return published_shift(family.settings.model) or preset.flow_shift


def describe_shift(family: ModelFamily, shift: float | ShiftOfShape, shapes: Sequence[Shape]) -> str:
    """Return the shift of noise levels over shapes in px, in words."""
    own = family.settings.objective
    origin = "" if own.flow_schedule_shift is not None else ", as its scheduler samples"
    if not callable(shift):
        return f"shifted by {shift:g}{origin}" + (" 1024 px" if origin else "")
    found = sorted((round(shift(shape.in_cells(family.cell)), 3), shape) for shape in shapes)
    ends = dict.fromkeys(f"{value:g} ({shape} px)" for value, shape in (found[0], found[-1]))
    return f"shifted by {' to '.join(ends)}{origin}"


# Largest distance from latents of variance 1 at which a loop may end.
REACHED = 2e-2
STEPS = 8


def noise_levels(sigmas: Tensor) -> Tensor:
    # Some schedulers count from 0 at pure noise (Mochi).
    return sigmas if sigmas[0] > sigmas[len(sigmas) // 2] else 1 - sigmas


def with_steps(scheduler: SchedulerMixin, steps: int) -> Any:
    """Return a scheduler of the same config that is set to so many steps."""
    own = type(scheduler).from_config(scheduler.config)
    own.set_timesteps(steps, **({"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}))
    return own


def why_no_flow(scheduler: SchedulerMixin) -> str:
    """Reason why a scheduler's steps are not a flow with times of 1000 * sigma; empty if they are.

    That is what the classes of flow families call their denoisers with. It takes milliseconds: no model is
    run.
    """
    try:
        own = with_steps(scheduler, STEPS)
        generator = torch.Generator().manual_seed(0)
        clean, sample = (torch.randn(1, 4, 4, 4, generator=generator) for _ in range(2))
        for step, time in enumerate(own.timesteps):
            level = own.sigmas[step]
            if abs(float(time) - 1000 * float(level)) > 1.01:  # some round times to integers
                return f"calls the noise level {float(level):.3g} time {float(time):.4g}, not {1000 * float(level):.4g}"
            # Schedulers that draw noise in a step have no argument for its generator in common.
            with torch.random.fork_rng(devices=()):
                sample = own.step((sample - clean) / level, time, sample, return_dict=False)[0]
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        return f"takes no steps of a flow: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    off = float((sample - clean).abs().max() / clean.abs().max())
    return "" if off < REACHED else f"leads exact predictions {off:.2g} away from where they point"
