"""Parameters of sampled images and clips."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL.Image import Image

from simpletuner.settings.values.shape import Shape


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a sampled image or clip: shape in px, denoising steps, guidance scale, seed."""

    shape: Shape
    steps: int
    guidance: float
    seed: int
    fps: float = 0.0
    """Frames per second of a clip."""
    references: tuple[Image, ...] = ()
    """Reference images of the prompt, in the size of their encoding."""

    def kwargs(self) -> dict[str, object]:
        """Arguments that every pipeline of diffusers takes, so that it returns latents."""
        return {
            "width": self.shape.width,
            "height": self.shape.height,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            # A generator on the CPU gives the same noise on every device.
            "generator": torch.Generator().manual_seed(self.seed),
            "output_type": "latent",
        }
