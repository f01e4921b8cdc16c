"""Sound to latents and back: the audio VAE and vocoder of LTX-2, and the spectrogram that they work on.

diffusers has only the way back. The spectrogram is that of ltx-core's AudioProcessor (Lightricks/LTX-2):
magnitudes of a centred short-time Fourier transform, Slaney's mel scale and norm, logarithm of at least 1e-5.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simpletuner.data.images.sounds import SoundFormat
from simpletuner.models.folder.diffusers_io import diffusers_class
from simpletuner.models.folder.malformed import read_json
from simpletuner.models.folder.weights import any_weights_files, variant_of
from simpletuner.settings.declared.sections import Model

# Samples of sound in one Fourier transform, of the published models; no config says it.
WINDOW = 1024
LEAST_MAGNITUDE = 1e-5


class SoundVae:
    """Audio VAE of a pipeline's folder, whose latents are tokens (B, tokens, channels * mel bins)."""

    def __init__(self, folder: Path, device: torch.device, settings: Model, frame_rate: float) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings.vae_dtype]
        self.model = load_frozen(diffusers_class("AutoencoderKLLTX2Audio"), folder / "audio_vae", dtype).to(device)
        self.device, self.dtype = device, dtype
        self.format = sound_format(folder, frame_rate)

    @cached_property
    def mel_filters(self) -> Tensor:
        """Weights (mel bins, frequencies)."""
        from transformers.audio_utils import mel_filter_bank

        config, rate = self.model.config, self.format.rate
        bins = WINDOW // 2 + 1
        found = mel_filter_bank(bins, config.mel_bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
        return torch.from_numpy(found.astype(np.float32).T).to(self.device)

    def spectrogram(self, sound: Tensor) -> Tensor:
        """Return the log-mel spectrogram (B, channels, times, mel bins) of sound (B, channels, samples)."""
        window = torch.hann_window(WINDOW, device=sound.device)
        hop = self.model.config.mel_hop_length
        found = torch.stft(
            sound.flatten(0, 1), WINDOW, hop, window=window, center=True, pad_mode="reflect", return_complex=True
        )
        mel = (self.mel_filters @ found.abs()).clamp(min=LEAST_MAGNITUDE).log()
        return mel.unflatten(0, sound.shape[:2]).transpose(2, 3)

    @torch.no_grad()
    def encode(self, sound: Tensor, tokens: int) -> Tensor:
        """Encode sound (B, channels, samples) to its first `tokens` tokens, normalized float32 on the CPU."""
        # A token depends on no later sound, so those that are left out have no effect on the others.
        encoded = self.model.encode(self.spectrogram(sound.to(self.device)).to(self.dtype)).latent_dist.mode()
        found = encoded[:, :, :tokens].transpose(1, 2).flatten(2).float()
        return ((found - self.model.latents_mean.float()) / self.model.latents_std.float()).cpu()


def load_frozen(cls: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Load a component that is not trained, in host memory."""
    variant = variant_of(any_weights_files(folder)[0])
    model = cls.from_pretrained(folder, dtype=dtype, use_safetensors=True, variant=variant)
    return model.requires_grad_(False).eval()


def sound_format(folder: Path, frame_rate: float) -> SoundFormat:
    """Return what the audio VAE of a pipeline's folder takes."""
    config = read_json(folder / "audio_vae" / "config.json")
    return SoundFormat(config["sample_rate"], config["in_channels"], frame_rate)
