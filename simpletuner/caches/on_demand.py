"""Latents and text embeddings that are encoded while training, ahead of the step, and stored nowhere.

Each image and each caption is encoded by itself, since an encoder's output depends in its last bits on the batch. So it
is the same at every step and on any number of ranks, and that of a cache filled with a batch size of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.latents import decode_image, encode, encode_first_frame, undecodable
from simpletuner.caches.texts import without_padding
from simpletuner.data.samples.samples import Sample
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning, TextEncoder
from simpletuner.models.family.vae import Vae
from simpletuner.report import Report


@dataclass(frozen=True)
class LatentsOnDemand:
    """The latents of samples of one dataset, rounded to `dtype` as a cache would store them."""

    vae: Encoder[Vae]
    dtype: torch.dtype
    encodes_first_frame: bool = False

    def fill(self, chunk: int, report: Report, stop: Callable[[], None]) -> dict[str, str]:
        self.vae.load_early()
        return {}

    def read(self, sample: Sample) -> Tensor:
        """Return a sample's latents (C, H, W), or (C, F, H, W) of a clip, float32.

        Raises DataError where the image cannot be decoded.
        """
        return self._encoded(sample)[0][0].to(self.dtype).float()

    def read_mask(self, sample: Sample) -> Tensor | None:
        """Return a sample's mask of the loss (1, H, W), float32, if it has one."""
        masks = self._encoded(sample)[1] if sample.mask else None
        return None if masks is None else masks[0].cpu()

    def read_first_frame(self, sample: Sample) -> Tensor:
        """Encoded first frame of a clip (C, F, H, W), float32."""
        if not self.encodes_first_frame:
            return self.read(sample)[:, :1]
        with self.vae.use() as vae:
            return encode_first_frame(vae, self._pixels(sample)[None])[0].to(self.dtype).float()

    def _encoded(self, sample: Sample) -> tuple[Tensor, Tensor | None]:
        pixels = self._pixels(sample)
        with self.vae.use() as vae:
            return encode(vae, pixels[None])

    def _pixels(self, sample: Sample) -> Tensor:
        pixels = decode_image(sample)
        if isinstance(pixels, str):
            hint = "remove it, or leave out vae_cache_disable: what cannot be decoded is then left out before training"
            raise undecodable(sample, pixels, hint)
        return pixels


@dataclass(frozen=True)
class TextOnDemand:
    """The embeddings of captions."""

    encoder: Encoder[TextEncoder]
    family: ModelFamily

    def fill(self, chunk: int, report: Report, stop: Callable[[], None]) -> None:
        self.encoder.load_early()

    def read(self, caption: str) -> Conditioning:
        """Return a caption's embedding, without a batch axis."""
        with self.encoder.use() as encoder:
            encoded = without_padding(self.family, encoder.encode([caption]))
        return {name: value[0] for name, value in encoded.items()}
