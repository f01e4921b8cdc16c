"""The cache of text embeddings: each caption encoded once, by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.caches.filling import fill_cache
from simpletuner.caches.jobs import CacheJob, CacheRequest
from simpletuner.caches.keys import folder_fingerprint, short_hash, text_parts
from simpletuner.caches.shards import ShardReader
from simpletuner.models.diffusers_io import text_folders
from simpletuner.models.family import ModelFamily
from simpletuner.models.text_encoding import Conditioning, TextEncoder
from simpletuner.parallel.world import World
from simpletuner.report import Report


class TextCache:
    """The embeddings of some captions, in one folder; a record is named by the hash of its caption."""

    def __init__(
        self, folder: Path, captions: Iterable[str], family: ModelFamily, world: World, dtype: torch.dtype
    ) -> None:
        self.folder, self.family, self.world, self.dtype = folder, family, world, dtype
        self.parts = text_parts(folder_fingerprint(text_folders(family.folder)), str(dtype), family.max_length)
        self.captions = sorted(set(captions))
        self.reader: ShardReader | None = None

    def fill(self, chunk: int, report: Report, stop: Callable[[], None]) -> None:
        """Collective: encode what is missing."""
        job = CacheJob("text", self.folder, chunk, self.captions, self.request, str, self._encode)
        self.reader, _ = fill_cache(job, self.world, report, stop)
        self.__dict__.pop("_encoder", None)  # its memory is needed for training

    def requests(self) -> Iterator[CacheRequest]:
        return map(self.request, self.captions)

    def request(self, caption: str) -> CacheRequest:
        return CacheRequest(short_hash(caption), self.parts)

    def read(self, caption: str) -> Conditioning:
        """Return a caption's embedding, without a batch axis."""
        assert self.reader is not None
        location = self.reader.find(short_hash(caption), self.parts)
        assert location is not None, f"{caption!r} is not in {self.folder} after filling it"
        return self.reader.read(location)

    @cached_property
    def _encoder(self) -> TextEncoder:
        return self.family.text_encoder(self.world.device, self.dtype)

    def _encode(self, chunk: Sequence[str]) -> list[Mapping[str, Tensor]]:
        encoded = self._encoder.encode(chunk)
        return [{key: value[number] for key, value in encoded.items()} for number in range(len(chunk))]
