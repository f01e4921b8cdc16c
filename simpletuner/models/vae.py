"""Pixels to latents and back, for every VAE of diffusers that gives one latent per picture.

Video VAEs see a picture as a film of one frame; latents are BCHW everywhere outside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from simpletuner.models.diffusers_io import class_of_diffusers
from simpletuner.models.malformed import read_json
from simpletuner.models.weights import any_weights_files, variant_of


class Vae:
    """A VAE with the normalisation that its config states."""

    def __init__(self, folder: Path, device: torch.device, precision: Literal["fp32", "bf16"]) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        variant = variant_of(any_weights_files(folder)[0])
        cls = class_of_diffusers(read_json(folder / "config.json")["_class_name"])
        self.model = cls.from_pretrained(folder, dtype=dtype, use_safetensors=True, variant=variant)
        self.model.requires_grad_(False).eval().to(device)
        self.device, self.dtype = device, dtype
        self.has_frames = any(parameter.ndim == 5 for parameter in self.model.parameters())
        norm = getattr(self.model, "bn", None)
        self.patch_norm = norm if isinstance(norm, nn.BatchNorm2d) else None
        """The statistics of patches, of a VAE that has them (AutoencoderKLFlux2): its patches are the latents."""
        self.patch = self.model.config.patch_size[0] if self.patch_norm else 1

    @property
    def downscale(self) -> int:
        """Return how many pixels wide one latent is."""
        ratio = getattr(self.model, "spatial_compression_ratio", None)
        return (ratio or 2 ** (len(self.model.config.block_out_channels) - 1)) * self.patch

    @torch.no_grad()
    def encode(self, pixels_BCHW: Tensor) -> Tensor:
        """Return latents BCHW in float32: the mean of the posterior, whose spread is far below the training noise."""
        pixels = pixels_BCHW.to(self.device, self.dtype)
        encoded = self.model.encode(pixels.unsqueeze(2) if self.has_frames else pixels)
        # An autoencoder without a posterior (AutoencoderDC) answers with the latents themselves.
        latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
        return self.normalised(latents.squeeze(2) if self.has_frames else latents).cpu()

    def normalised(self, latents_BCHW: Tensor) -> Tensor:
        """Return the model's own latents as the denoiser sees them, in float32."""
        mean, scale = self._statistics()
        return (pixel_unshuffle(latents_BCHW.to(self.device).float(), self.patch) - mean) * scale

    @torch.no_grad()
    def decode(self, latents_BCHW: Tensor) -> Tensor:
        """Return pixels BCHW in -1..1, float32."""
        mean, scale = self._statistics()
        latents = pixel_shuffle(latents_BCHW.to(self.device).float() / scale + mean, self.patch).to(self.dtype)
        config: Any = self.model.config
        # A decoder that also denoises wants to know how noisy its latents are: not at all.
        told = {"temb": latents.new_zeros(len(latents))} if config.get("timestep_conditioning") else {}
        pixels = self.model.decode(latents.unsqueeze(2) if self.has_frames else latents, **told).sample
        return (pixels.squeeze(2) if self.has_frames else pixels).float().clamp(-1, 1).cpu()

    def _statistics(self) -> tuple[Any, Any]:
        """Return (mean, scale) so that the denoiser sees (latents - mean) * scale.

        Statistics of each channel are in the config, or in buffers beside the weights (AutoencoderKLLTXVideo).
        """
        if self.patch_norm:
            mean, variance = self.patch_norm.running_mean.float(), self.patch_norm.running_var.float()
            return mean.view(1, -1, 1, 1), (variance + self.patch_norm.eps).rsqrt().view(1, -1, 1, 1)
        config: Any = self.model.config
        scale = getattr(config, "scaling_factor", None) or 1.0
        known = dict(config) | dict(self.model.named_buffers(recurse=False))
        mean, std = known.get("latents_mean"), known.get("latents_std")
        if mean is None or std is None:
            return getattr(config, "shift_factor", None) or 0.0, scale
        mean, std = (torch.as_tensor(each, device=self.device).float().view(1, -1, 1, 1) for each in (mean, std))
        return mean, scale / std
