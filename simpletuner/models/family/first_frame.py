"""Image-to-video by a clean first frame among the noised tokens of a clip, whose timestep is 0."""

from __future__ import annotations

import torch
from torch import Tensor

from simpletuner.settings.values.shape import Shape


def per_token_timesteps(timesteps_B: Tensor, tokens: Shape) -> Tensor:
    """Return a timestep for each token, (B, frames * height * width)."""
    return timesteps_B[:, None].repeat(1, tokens.frames * tokens.area)


def condition_on_first_frame(
    first: Tensor, noised: Tensor, timesteps_B: Tensor, tokens: Shape
) -> tuple[Tensor, Tensor]:
    """Return latents (B, C, F, H, W) with another first frame, and timesteps of all tokens, 0 in that frame."""
    times = per_token_timesteps(timesteps_B, tokens)
    times[:, : tokens.area] = 0
    return torch.cat([first.to(noised.dtype), noised[:, :, 1:]], dim=2), times
