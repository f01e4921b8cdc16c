"""The optimizer, and the learning rate as a function of the step alone, so that a resumed run cannot differ."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from simpletuner.settings.sections import Optimizer


def make_optimizer(parameters: Iterable[nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    """Return fused AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.adam_weight_decay,
        fused=True,
    )


def learning_rate_at(step: int, max_steps: int, settings: Optimizer) -> float:
    """Return the learning rate of the optimizer step that follows `step` finished ones."""
    peak, end, warm_up = settings.learning_rate, settings.lr_end, settings.lr_warmup_steps
    if step < warm_up:
        return peak * (step + 1) / (warm_up + 1)
    progress = min(1.0, (step - warm_up) / max(1, max_steps - warm_up))
    remaining = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "polynomial": (1 - progress) ** settings.lr_power,
    }.get(settings.lr_scheduler, 1.0)
    return end + (peak - end) * remaining if settings.lr_scheduler in ("linear", "cosine", "polynomial") else peak
