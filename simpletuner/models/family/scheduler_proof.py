"""The proof that a scheduler samples what is trained: exact predictions lead its own steps to known latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

REACHED = 2e-2
"""Largest distance from latents of variance 1 at which a loop may end."""
STEPS = 8


def noise_levels(sigmas: Tensor) -> Tensor:
    """Return the share of noise at each sigma: some schedulers count it from 0 at pure noise (Mochi)."""
    return sigmas if sigmas[0] > sigmas[len(sigmas) // 2] else 1 - sigmas


def with_steps(scheduler: Any, steps: int) -> Any:
    """Return a scheduler of the same config that is set to so many steps."""
    own = type(scheduler).from_config(scheduler.config)
    own.set_timesteps(steps, **({"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}))
    return own


def why_no_flow(scheduler: Any) -> str:
    """Return why steps of a scheduler do not follow a flow whose times are its noise levels times 1000; empty if so.

    That is what the classes of flow families call their denoisers with. It takes milliseconds: no model is run.
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
