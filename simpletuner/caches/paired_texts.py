"""Embeddings of captions by text encoders that read the references of a sample, too: one record per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.fill.fill import fill_cache
from simpletuner.caches.fill.jobs import CacheJob, CacheRequest, Made
from simpletuner.caches.fill.write_through import GrowingCache, open_growing
from simpletuner.caches.latents import decoding_threads, undecodable
from simpletuner.caches.store.keys import KeyParts, folder_fingerprint, reference_parts, short_hash, text_parts
from simpletuner.caches.store.mirror import Mirror
from simpletuner.caches.store.shards import ShardReader
from simpletuner.caches.texts import without_padding
from simpletuner.data.images.images import DECODE_ERRORS
from simpletuner.data.samples.samples import DatasetSamples, Sample, reference_images
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning, TextEncoder
from simpletuner.models.folder.diffusers_io import text_folders
from simpletuner.parallel.world import World
from simpletuner.report import Report

Loaded = tuple[tuple[str, ...], tuple[Image, ...]] | str
"""Captions and references of a sample, or why these cannot be decoded."""


class PairedTexts:
    """The embeddings of all captions of each sample, and of its empty caption, cached or encoded while training."""

    def __init__(
        self,
        folder: Path,
        samples: DatasetSamples,
        encoder: Encoder[TextEncoder],
        family: ModelFamily,
        world: World,
        dtype: torch.dtype,
        compress: bool,
        mirror: Mirror | None,
        writers: ExitStack,
    ) -> None:
        self.folder, self.samples, self.encoder, self.family, self.world = folder, samples, encoder, family, world
        self.compress, self.mirror, self.writers = compress, mirror, writers
        encoders = folder_fingerprint(text_folders(family.folder))
        self.parts = {**text_parts(encoders, str(dtype), family.max_length), **family.cache_facts}
        self.reader: ShardReader | None = None
        self.growing: GrowingCache[Sample, Loaded] | None = None

    def fill(self, report: Report, stop: Callable[[], None]) -> dict[str, str]:
        """Collective: encode what is missing, unless it is encoded while training.

        Return the samples whose references cannot be decoded, with the reason.
        """
        job = CacheJob(
            title="captions with references",
            folder=self.folder,
            digest=short_hash([self.samples.checksum("name", "version", "captions"), self.parts]),
            chunk=1,  # all texts of a batch are about the same references
            items=lambda: self.samples,
            request=self.request,
            load=load,
            make=self._encode,
            threads=decoding_threads(self.samples, self.world),
            compress=self.compress,
            mirror=self.mirror,
        )
        if self.samples.dataset.text_cache_disable:
            self.encoder.load_early()
            return {}
        if self.samples.dataset.text_cache_ondemand:
            self.growing, broken = open_growing(job, self.world, stop, self.writers, self.encoder.load_early)
        else:
            self.reader, broken = fill_cache(job, self.world, report, stop)
        return broken

    def requests(self) -> Iterator[CacheRequest]:
        return map(self.request, self.samples)

    def request(self, sample: Sample) -> CacheRequest:
        parts: KeyParts = {**self.parts, "captions": short_hash(sample.captions), **reference_parts(sample)}
        return CacheRequest(sample.id, parts)

    def read(self, sample: Sample, caption: str) -> Conditioning:
        """Return the embedding of one of a sample's captions, or of the empty one, without a batch axis.

        Raises DataError where a reference turns out to be damaged.
        """
        record = self._record(sample)
        if isinstance(record, str):
            raise undecodable(sample, record, "remove it, or run the same command again: it is left out then")
        prefix = f"{texts_of(sample).index(caption)}."
        return {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}

    def _record(self, sample: Sample) -> Made:
        if self.growing is not None:
            return self.growing.read(sample)
        if self.reader is None:
            return self._encode([load(sample)])[0]
        request = self.request(sample)
        location = self.reader.find(request.name, request.parts)
        assert location is not None, f"{sample.id} is not in {self.folder} after filling it"
        return self.reader.read(location)

    def _encode(self, loaded: Sequence[Loaded]) -> list[Made]:
        return [each if isinstance(each, str) else self._encode_sample(*each) for each in loaded]

    def _encode_sample(self, texts: tuple[str, ...], references: tuple[Image, ...]) -> Mapping[str, Tensor]:
        with self.encoder.use() as encoder:
            each = [without_padding(self.family, encoder.encode([text], references)) for text in texts]
        return {f"{number}.{name}": value[0] for number, own in enumerate(each) for name, value in own.items()}


def texts_of(sample: Sample) -> tuple[str, ...]:
    """Return what is encoded of a sample: the empty caption stands for a dropped one."""
    return (*sample.captions, "")


def load(sample: Sample) -> Loaded:
    try:
        return texts_of(sample), reference_images(sample)
    except DECODE_ERRORS as error:
        return f"its reference: {error}"
