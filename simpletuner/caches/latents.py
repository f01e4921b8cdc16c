"""The cache of latents: pictures decoded, resized, cropped and encoded once, by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.caches.filling import Job, Wanted, fill
from simpletuner.caches.keys import folder_fingerprint, latents_parts
from simpletuner.caches.shards import ShardReader
from simpletuner.data.discovery import Sample
from simpletuner.data.images import BROKEN, read_rgb, resized_and_cropped
from simpletuner.models.family import ModelFamily
from simpletuner.models.vae import Vae
from simpletuner.parallel.world import World
from simpletuner.report import Report

DECODING_THREADS = 2


class LatentsCache:
    """The latents of some samples, in one folder."""

    def __init__(
        self, folder: Path, samples: Sequence[Sample], family: ModelFamily, world: World, vae_dtype: str
    ) -> None:
        vae = folder_fingerprint([family.folder / "vae"])
        self.folder, self.family, self.world = folder, family, world
        self.samples = {sample.id: sample for sample in samples}
        self.parts = {sample.id: latents_parts(sample, vae, vae_dtype) for sample in samples}
        self.reader: ShardReader | None = None

    def fill(self, chunk: int, report: Report, stop: Callable[[], None]) -> dict[str, str]:
        """Encode what is missing; return the samples that could not be decoded, with the reason."""
        wanted = [Wanted(name, self.parts[name], str(sample.geometry.target)) for name, sample in self.samples.items()]
        job = Job("latents", self.folder, chunk, self._make)
        self.reader = fill(job, wanted, self.world, report, stop)
        self.__dict__.pop("_vae", None)  # its memory is wanted for training
        return {name: place.broken for name in self.samples if (place := self._place(name)).broken}

    def read(self, sample: Sample) -> Tensor:
        """Return a sample's latents (CHW), float32."""
        assert self.reader is not None
        return self.reader.read(self._place(sample.id))["latents"]

    def _place(self, name: str):
        assert self.reader is not None
        place = self.reader.find(name, self.parts[name])
        assert place is not None, f"{name} is not in {self.folder} after filling it"
        return place

    @cached_property
    def _vae(self) -> Vae:
        return self.family.vae(self.world.device)

    def _make(self, chunk: Sequence[Wanted]) -> Iterator[tuple[Wanted, Mapping[str, Tensor] | str]]:
        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            decoded = list(pool.map(decode, [self.samples[item.name] for item in chunk]))
        yield from ((item, each) for item, each in zip(chunk, decoded, strict=True) if isinstance(each, str))
        good = [(item, pixels) for item, pixels in zip(chunk, decoded, strict=True) if isinstance(pixels, Tensor)]
        if good:
            latents = self._vae.encode(torch.stack([pixels for _, pixels in good]))
            yield from ((item, {"latents": each}) for (item, _), each in zip(good, latents, strict=True))


def decode(sample: Sample) -> Tensor | str:
    """Return a sample's pixels (CHW, -1..1), or why its file cannot be decoded."""
    g = sample.geometry
    try:
        pixels = resized_and_cropped(read_rgb(sample.path, g.resized), g.resized, g.crop_left_top, g.target)
    except BROKEN as error:
        return str(error) or type(error).__name__
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
