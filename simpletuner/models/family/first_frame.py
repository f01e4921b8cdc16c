"""A first frame without noise among the tokens of a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from simpletuner.settings.values.shape import Shape


def times_of_tokens(timesteps_B: Tensor, tokens: Shape) -> Tensor:
    """Return a timestep for each token, (B, frames * height * width)."""
    return timesteps_B[:, None].repeat(1, tokens.frames * tokens.area)


def begin_with(first: Tensor, noised: Tensor, timesteps_B: Tensor, tokens: Shape) -> tuple[Tensor, Tensor]:
    """Return latents (B, C, F, H, W) whose first frame is replaced, and the times of all tokens, 0 in that frame."""
    times = times_of_tokens(timesteps_B, tokens)
    times[:, : tokens.area] = 0
    return torch.cat([first.to(noised.dtype), noised[:, :, 1:]], dim=2), times
