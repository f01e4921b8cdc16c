"""The latents cache: images decoded, resized, cropped and encoded once, by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.caches.filling import CacheJob, CacheRequest, fill_cache
from simpletuner.caches.keys import folder_fingerprint, latents_parts
from simpletuner.caches.shards import RecordLocation, ShardReader
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
        vae = folder_fingerprint([family.folder / "vae"])
        self.folder, self.family, self.world = folder, family, world
        self.samples = {sample.id: sample for sample in samples}
        self.parts = {sample.id: latents_parts(sample, vae, vae_dtype) for sample in samples}
        self.reader: ShardReader | None = None

    def fill(self, chunk: int, report: Report, stop: Callable[[], None]) -> dict[str, str]:
        """Collective: encode what is missing. Return the samples that could not be decoded, with the reason."""
        # Grouped by target size, since only images of one shape can share a batch.
        requests = [
            CacheRequest(name, self.parts[name], str(sample.geometry.target)) for name, sample in self.samples.items()
        ]
        job = CacheJob("latents", self.folder, chunk, self._encode)
        self.reader = fill_cache(job, requests, self.world, report, stop)
        self.__dict__.pop("_vae", None)  # its memory is needed for training
        return {name: location.broken for name in self.samples if (location := self._locate(name)).broken}

    def read(self, sample: Sample) -> Tensor:
        """Return a sample's latents (C, H, W), float32."""
        assert self.reader is not None
        return self.reader.read(self._locate(sample.id))["latents"]

    def _locate(self, name: str) -> RecordLocation:
        assert self.reader is not None
        location = self.reader.find(name, self.parts[name])
        assert location is not None, f"{name} is not in {self.folder} after filling it"
        return location

    @cached_property
    def _vae(self) -> Vae:
        return self.family.vae(self.world.device)

    def _encode(self, chunk: Sequence[CacheRequest]) -> Iterator[tuple[CacheRequest, Mapping[str, Tensor] | str]]:
        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            decoded = list(pool.map(decode_image, [self.samples[request.name] for request in chunk]))
        yield from ((request, each) for request, each in zip(chunk, decoded, strict=True) if isinstance(each, str))
        good = [(request, pixels) for request, pixels in zip(chunk, decoded, strict=True) if isinstance(pixels, Tensor)]
        if good:
            latents = self._vae.encode(torch.stack([pixels for _, pixels in good]))
            yield from ((request, {"latents": each}) for (request, _), each in zip(good, latents, strict=True))


def decode_image(sample: Sample) -> Tensor | str:
    """Return a sample's pixels (3, H, W) in [-1, 1], or why its file cannot be decoded."""
    g = sample.geometry
    try:
        with sample.open() as file:
            pixels = resize_and_crop(read_rgb(file, g.resized), g.resized, g.crop_left_top, g.target)
    except DECODE_ERRORS as error:
        return str(error) or type(error).__name__
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
