"""Defaults that are an optimizer's own, where they differ from those of AdamW, which sections.py declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    # Chen et al. 2023, arXiv:2302.06675, algorithm 2: its one moment remembers 100 steps, not the 1,000 of 0.999.
    "lion": {"adam_beta1": 0.9, "adam_beta2": 0.99},
    # Of these the papers have no weight decay, and torch's classes have 0; it would be added to the gradient of the
    # first two (Kingma and Ba 2015, Duchi et al. 2011, Shazeer and Stern 2018).
    "adam": {"adam_weight_decay": 0.0},
    "adagrad": {"adam_weight_decay": 0.0},
    "adafactor": {"adam_weight_decay": 0.0},
    # Mishchenko and Defazio 2023, arXiv:2306.06101: what it finds is multiplied by a rate of 1.
    "prodigy": {"learning_rate": 1.0, "adam_weight_decay": 0.0},
}


def own_defaults(optimizer: object) -> Mapping[str, float]:
    """Return the defaults of an optimizer that are not AdamW's, by setting."""
    return OWN_DEFAULTS.get(optimizer, {}) if isinstance(optimizer, str) else {}


def with_own_defaults(values: Any) -> Any:
    """Add an optimizer's own defaults to the settings that were given with it."""
    return {**own_defaults(values.get("optimizer")), **values} if isinstance(values, dict) else values
