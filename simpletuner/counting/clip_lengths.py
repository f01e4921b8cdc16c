"""Lengths of clips that a VAE brings back, found by encoding and decoding on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from simpletuner.models.automatic.pipeline_run import FOREIGN_ERRORS
from simpletuner.models.family.vae import cell_of_model, has_alpha
from simpletuner.models.folder.diffusers_io import build_on_meta

SIDE_CELLS = 8
"""Sides of the clips that are tried, in latent cells."""


def frame_step_of(config: Mapping[str, object]) -> int:
    """Frame step of clip lengths, each with one frame more: a VAE decodes as many as it encodes.

    CogVideoX decodes pairs of latent frames after the first, so its step is twice what a cell covers.
    """
    covered = cell_of_model(build_on_meta(config), patch=1).frames
    return next((step for step in (covered, 2 * covered) if comes_back(config, 1 + step)), covered)


@torch.no_grad()
def comes_back(config: Mapping[str, object], frames: int) -> bool:
    """True if a VAE decodes a clip of `frames` frames to the same number; False if it cannot encode it."""
    vae = build_on_meta(config, include_buffers=True)
    side = SIDE_CELLS * cell_of_model(vae, patch=1).width
    # The decoder of LTX-Video 0.9.5 also denoises, and takes the noise level of its latents.
    is_timed = bool(config.get("timestep_conditioning"))
    try:
        with torch.device("meta"):
            latents = vae.encode(torch.empty(1, 4 if has_alpha(config) else 3, frames, side, side)).latent_dist.mode()
            decoded = vae.decode(latents, **({"temb": torch.zeros(1)} if is_timed else {})).sample
    except FOREIGN_ERRORS:  # Allegro encodes tiles alone: the proof says so in a sentence
        return False
    return decoded.shape[2] == frames
