"""Pixels to latents and back, for the AutoencoderKL that most families use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from simpletuner.models.components import any_weights_files, variant_of


class KlVae:
    """An AutoencoderKL with the scaling that its config states."""

    def __init__(self, folder: Path, device: torch.device, precision: Literal["fp32", "bf16"]) -> None:
        from diffusers import AutoencoderKL

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        variant = variant_of(any_weights_files(folder)[0])
        self.model = AutoencoderKL.from_pretrained(folder, dtype=dtype, use_safetensors=True, variant=variant)
        self.model.requires_grad_(False).eval().to(device)
        self.device, self.dtype = device, dtype

    @torch.no_grad()
    def encode(self, pixels_BCHW: Tensor) -> Tensor:
        """Return latents BCHW in float32: the mean of the posterior, whose spread is far below the training noise."""
        posterior = self.model.encode(pixels_BCHW.to(self.device, self.dtype)).latent_dist
        mean, scale = self._statistics()
        return ((posterior.mode().float() - mean) * scale).cpu()

    @torch.no_grad()
    def decode(self, latents_BCHW: Tensor) -> Tensor:
        """Return pixels BCHW in -1..1, float32."""
        mean, scale = self._statistics()
        latents = latents_BCHW.to(self.device).float() / scale + mean
        return self.model.decode(latents.to(self.dtype)).sample.float().clamp(-1, 1).cpu()

    def _statistics(self) -> tuple[Any, Any]:
        config: Any = self.model.config
        if config.latents_mean is not None and config.latents_std is not None:
            mean = torch.tensor(config.latents_mean, device=self.device).view(1, -1, 1, 1)
            return mean, config.scaling_factor / torch.tensor(config.latents_std, device=self.device).view(1, -1, 1, 1)
        return config.shift_factor or 0.0, config.scaling_factor
