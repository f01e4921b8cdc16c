"""Pixels to latents and back, for every VAE of diffusers that has one latent per image.

Pixels and latents are BCHW of images and BCFHW of clips; only here an image is a video VAE's clip of one
frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from simpletuner.errors import SettingsError
from simpletuner.models.folder.diffusers_io import build_on_meta, diffusers_class
from simpletuner.models.folder.malformed import read_json
from simpletuner.models.folder.weights import any_weights_files, variant_of
from simpletuner.parallel.gpu import return_memory
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.values.shape import Shape


class Vae:
    """A VAE with the normalization that its config states."""

    def __init__(self, folder: Path, device: torch.device, settings: Model) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings.vae_dtype]
        variant = variant_of(any_weights_files(folder)[0])
        cls = diffusers_class(read_json(folder / "config.json")["_class_name"])
        self.model = cls.from_pretrained(folder, dtype=dtype, use_safetensors=True, variant=variant)
        self.model.requires_grad_(False).eval().to(device)
        enable_parts(self.model, settings)
        self.device, self.dtype = device, dtype
        self.has_frames = takes_frames(self.model)
        self.has_alpha = has_alpha(self.model.config)
        # AutoencoderKLFlux2 has statistics of 2x2 patches, as a batch norm: its patches are the latents.
        norm = getattr(self.model, "bn", None)
        self.patch_norm = norm if isinstance(norm, nn.BatchNorm2d) else None
        self.patch = self.model.config.patch_size[0] if self.patch_norm else 1

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Keep the model on a device within the block, and in the host's memory after it."""
        self.device = device
        self.model.to(device)
        try:
            yield
        finally:
            self.device = torch.device("cpu")
            self.model.to(self.device)
            return_memory(device)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Cast the encoder's input to the dtype of the weights: pipelines give references the text's."""
        hook = self.model.encoder.register_forward_pre_hook(lambda _, given: (given[0].to(self.dtype), *given[1:]))
        try:
            yield
        finally:
            hook.remove()

    @property
    def cell(self) -> Shape:
        """Frames and px that one latent cell covers."""
        return cell_of_model(self.model, self.patch)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels in -1..1, BCHW or BCFHW, to normalized latents, float32, on the CPU."""
        is_image = self.has_frames and pixels.ndim == 4
        pixels = pixels.to(self.device, self.dtype)
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1) if self.has_alpha else pixels  # opaque
        encoded = self.model.encode(pixels.unsqueeze(2) if is_image else pixels)
        # The mean of the posterior: its spread is far below the noise of training. An autoencoder without a
        # posterior (AutoencoderDC) returns the latents themselves.
        latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
        return self.normalize(latents.squeeze(2) if is_image else latents).cpu()

    def normalize(self, latents: Tensor) -> Tensor:
        """Convert the VAE's own latents to those that the denoiser sees, float32."""
        mean, scale = self._statistics(latents.ndim)
        return (pixel_unshuffle(latents.to(self.device).float(), self.patch) - mean) * scale

    def denormalize(self, latents: Tensor) -> Tensor:
        """Convert latents that the denoiser sees to the VAE's own."""
        mean, scale = self._statistics(latents.ndim)
        return pixel_shuffle(latents.to(self.device).float() / scale + mean, self.patch)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalized latents, BCHW or BCFHW, to pixels in -1..1, float32, on the CPU."""
        latents = self.denormalize(latents).to(self.device, self.dtype)
        is_image = self.has_frames and latents.ndim == 4
        config: Any = self.model.config
        # The decoder of LTX-Video 0.9.5 also denoises, and takes the noise level of its latents: here none.
        kwargs = {"temb": latents.new_zeros(len(latents))} if config.get("timestep_conditioning") else {}
        pixels = self.model.decode(latents.unsqueeze(2) if is_image else latents, **kwargs).sample
        return (pixels.squeeze(2) if is_image else pixels)[:, :3].float().clamp(-1, 1).cpu()

    def _statistics(self, ndim: int) -> tuple[Any, Any]:
        """(mean, scale) for latents of `ndim` axes, so that the denoiser sees (latents - mean) * scale."""
        by_channel = (1, -1, *[1] * (ndim - 2))
        if self.patch_norm:
            mean, variance = self.patch_norm.running_mean.float(), self.patch_norm.running_var.float()
            return mean.view(by_channel), (variance + self.patch_norm.eps).rsqrt().view(by_channel)
        config: object = self.model.config
        scale = getattr(config, "scaling_factor", None) or 1.0
        # Statistics of each channel: in the config, or in buffers among the weights (AutoencoderKLLTXVideo).
        known = dict(config) | dict(self.model.named_buffers(recurse=False))
        mean, std = known.get("latents_mean"), known.get("latents_std")
        if mean is None or std is None:
            return getattr(config, "shift_factor", None) or 0.0, scale
        mean, std = (torch.as_tensor(each, device=self.device).float().view(by_channel) for each in (mean, std))
        return mean, scale / std


def enable_parts(model: nn.Module, settings: Model) -> None:
    """Make a VAE work on tiles, or on one image at a time. Raises SettingsError if it cannot."""
    for part, is_on in (("tiling", settings.vae_enable_tiling), ("slicing", settings.vae_enable_slicing)):
        if is_on and not hasattr(model, f"use_{part}"):
            raise SettingsError(f"vae_enable_{part}: {type(model).__name__} has no {part}", "leave it out")
        if is_on:
            getattr(model, f"enable_{part}")()


def has_alpha(config: Any) -> bool:
    """True if a VAE takes RGBA (Qwen-Image 2.1)."""
    return config.get("in_channels") == 4


@torch.no_grad()
def takes_frames(model: Any) -> bool:
    parameters = list(model.parameters())
    if any(parameter.ndim == 5 for parameter in parameters):
        return True
    # Qwen-Image 2.1's takes clips of one frame, and has no 3-D convolutions: only a call tells.
    try:
        model.encode(parameters[0].new_zeros(1, 4 if has_alpha(model.config) else 3, 1, 32, 32))
    except (RuntimeError, ValueError):
        return False
    return True


def cell_of_model(model: Any, patch: int) -> Shape:
    """Frames and px that one latent cell covers; `patch` cells of the VAE's own are one."""
    ratio = getattr(model, "spatial_compression_ratio", None)
    side = (ratio or 2 ** (len(model.config.block_out_channels) - 1)) * patch
    return Shape(frames_of_cell(model), side, side)


def frames_of_cell(model: Any) -> int:
    # LTX-Video computes it if its config has none; Wan's VAEs have another name, read by WanPipeline.
    told = (vars(model).get("temporal_compression_ratio"), model.config.get("temporal_compression_ratio"))
    return next(filter(None, (*told, model.config.get("scale_factor_temporal"))), 1)


def cell_of(config: Mapping[str, Any]) -> Shape:
    """Frames and px that one latent cell covers, by the VAE's config alone."""
    if "_class_name" not in config:
        side = config["spatial_compression_ratio"]
        return Shape(config.get("temporal_compression_ratio", 1), side, side)
    model = build_on_meta(config)
    return cell_of_model(model, config["patch_size"][0] if hasattr(model, "bn") else 1)


def pixels_of(image: Image) -> Tensor:
    """Return an image in RGB as the VAE encodes it, (1, 3, H, W) in -1..1."""
    return torch.from_numpy(np.asarray(image, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]


def encode_first_frame(vae: Vae, pixels_BCFHW: Tensor, is_alone: bool = False) -> Tensor:
    """Latents of the first frame of clips alone, or with grey in place of the others."""
    if is_alone:
        return vae.encode(pixels_BCFHW[:, :3, :1])
    alone = torch.zeros_like(pixels_BCFHW[:, :3])
    alone[:, :, 0] = pixels_BCFHW[:, :3, 0]
    return vae.encode(alone)
