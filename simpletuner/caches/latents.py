"""The latents cache: images decoded, resized, cropped and encoded once, by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.caches.filling import CacheJob, CacheRequest, fill_cache
from simpletuner.caches.keys import KeyParts, folder_fingerprint, latents_parts
from simpletuner.caches.shards import ShardReader
from simpletuner.data.images import DECODE_ERRORS, read_rgb, resize_and_crop
from simpletuner.data.samples import Sample
from simpletuner.models.family import ModelFamily
from simpletuner.models.vae import Vae
from simpletuner.parallel.world import World
from simpletuner.report import Report

DECODING_THREADS = 2


class LatentsCache:
    """The latents of one dataset's samples, in one folder."""

    def __init__(
        self, folder: Path, samples: Sequence[Sample], family: ModelFamily, world: World, vae_dtype: str
    ) -> None:
        self.folder, self.samples, self.family, self.world = folder, samples, family, world
        self.vae, self.dtype = folder_fingerprint([family.folder / "vae"]), vae_dtype
        self.reader: ShardReader | None = None

    def fill(self, chunk: int, report: Report, stop: Callable[[], None]) -> dict[str, str]:
        """Collective: encode what is missing. Return the samples that could not be decoded, with the reason."""
        job = CacheJob("latents", self.folder, chunk, self.samples, self.request, self._encode)
        self.reader, broken = fill_cache(job, self.world, report, stop)
        self.__dict__.pop("_vae", None)  # its memory is needed for training
        return broken

    def requests(self) -> Iterator[CacheRequest]:
        return map(self.request, self.samples)

    def request(self, sample: Sample) -> CacheRequest:
        """Return what a sample needs; grouped by target size, since only images of one shape can share a batch."""
        return CacheRequest(sample.id, self._parts(sample), str(sample.geometry.target))

    def read(self, sample: Sample) -> Tensor:
        """Return a sample's latents (C, H, W), float32."""
        assert self.reader is not None
        location = self.reader.find(sample.id, self._parts(sample))
        assert location is not None, f"{sample.id} is not in {self.folder} after filling it"
        return self.reader.read(location)["latents"]

    def _parts(self, sample: Sample) -> KeyParts:
        return latents_parts(sample, self.vae, self.dtype)

    @cached_property
    def _vae(self) -> Vae:
        return self.family.vae(self.world.device)

    def _encode(self, chunk: Sequence[Sample]) -> list[Mapping[str, Tensor] | str]:
        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            decoded = list(pool.map(decode_image, chunk))
        good = [pixels for pixels in decoded if isinstance(pixels, Tensor)]
        latents = iter(self._vae.encode(torch.stack(good)) if good else ())
        return [each if isinstance(each, str) else {"latents": next(latents)} for each in decoded]


def decode_image(sample: Sample) -> Tensor | str:
    """Return a sample's pixels (3, H, W) in [-1, 1], or why its file cannot be decoded."""
    g = sample.geometry
    try:
        with sample.open() as file:
            pixels = resize_and_crop(read_rgb(file, g.resized, g.original), g.resized, g.crop_left_top, g.target)
    except DECODE_ERRORS as error:
        return str(error) or type(error).__name__
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
