"""The cache of text embeddings: each caption encoded once, by all ranks.

Embeddings of captions by text encoders that read the references of a sample, too: one record per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.fill import GrowingCache, fill_cache, open_growing
from simpletuner.caches.latents import decoding_threads, undecodable
from simpletuner.caches.store.mirror import Mirror
from simpletuner.caches.store.records import KeyParts, folder_fingerprint, reference_parts, short_hash, text_parts
from simpletuner.caches.store.shards import ShardReader
from simpletuner.caches.workers import CacheJob, CacheRequest, Made
from simpletuner.data.images.images import DECODE_ERRORS
from simpletuner.data.samples.dataset_summary import different_captions
from simpletuner.data.samples.samples import DatasetSamples, Sample, reference_images
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning, TextEncoder, has_clip, is_cleaned
from simpletuner.models.folder.diffusers_io import text_folders
from simpletuner.parallel.world import World
from simpletuner.report import Report


class TextCache:
    """The embeddings of some datasets' captions and of some prompts, in one folder, named by the hash of the text."""

    def __init__(
        self,
        folder: Path,
        samples: Sequence[DatasetSamples],
        prompts: Sequence[str],
        encoder: Encoder[TextEncoder],
        family: ModelFamily,
        world: World,
        dtype: torch.dtype,
        compress: bool,
        mirror: Mirror | None,
        writers: ExitStack | None,
    ) -> None:
        """`writers` is given where captions are encoded while training."""
        self.folder, self.samples, self.prompts, self.compress = folder, samples, prompts, compress
        self.encoder, self.family, self.world, self.mirror, self.writers = encoder, family, world, mirror, writers
        encoders = folder_fingerprint(text_folders(family.folder))
        self.parts = {**text_parts(encoders, str(dtype), family.max_length), **family.cache_facts}
        self.has_clip = has_clip(family.index)
        self.reader: ShardReader | None = None
        self.growing: GrowingCache[str, str] | None = None

    @cached_property
    def captions(self) -> Sequence[str]:
        """List of all texts, created only if some may be missing."""
        return different_captions(self.samples, self.prompts)

    def fill(self, chunk: int, report: Report, stop: Callable[[], None]) -> None:
        """Collective: encode what is missing, unless it is encoded while training."""
        contents = [part.checksum("name", "captions") for part in self.samples]
        job = CacheJob(
            title="captions",
            folder=self.folder,
            digest=short_hash([contents, list(self.prompts), self.parts, self.has_clip]),
            chunk=chunk,
            items=lambda: self.captions,
            request=self.request,
            load=str,
            make=self._encode,
            compress=self.compress,
            mirror=self.mirror,
        )
        if self.writers is not None:
            self.growing, _ = open_growing(job, self.world, stop, self.writers, self.encoder.load_early)
        else:
            self.reader, _ = fill_cache(job, self.world, report, stop)
        # All captions of all datasets, 0.9 GB of ten million, which nothing asks for any more.
        self.__dict__.pop("captions", None)

    def requests(self) -> Iterator[CacheRequest]:
        return map(self.request, self.captions)

    def request(self, caption: str) -> CacheRequest:
        return CacheRequest(short_hash(caption), self.parts_of(caption))

    def parts_of(self, caption: str) -> KeyParts:
        # Earlier commits have cached what CLIP's tokenizer makes of these texts without cleaning them.
        return self.parts | ({"cleaning": "CLIP's"} if self.has_clip and is_cleaned(caption) else {})

    def read(self, caption: str) -> Conditioning:
        """Return a caption's embedding, without a batch axis."""
        if self.growing is not None:
            made = self.growing.read(caption)
            assert not isinstance(made, str), "only images can be broken"
            return dict(made)
        assert self.reader is not None
        location = self.reader.find(short_hash(caption), self.parts_of(caption))
        assert location is not None, f"{caption!r} is not in {self.folder} after filling it"
        return self.reader.read(location)

    def _encode(self, chunk: Sequence[str]) -> list[Mapping[str, Tensor]]:
        with self.encoder.use() as encoder:
            encoded = without_padding(self.family, encoder.encode(chunk))
        return [{key: value[number] for key, value in encoded.items()} for number in range(len(chunk))]


def without_padding(family: ModelFamily, encoded: Conditioning) -> Conditioning:
    """Return embeddings with zeros, which records do not store, for padding that the denoiser ignores."""
    if not family.padding_mask:
        return encoded
    is_padding = encoded[family.padding_mask].unsqueeze(-1) == 0
    return encoded | {"prompt_embeds": encoded["prompt_embeds"].masked_fill(is_padding, 0)}


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
    """Texts to encode for a sample; a dropped caption is the empty one."""
    return (*sample.captions, "")


def load(sample: Sample) -> Loaded:
    try:
        return texts_of(sample), reference_images(sample)
    except DECODE_ERRORS as error:
        return f"its reference: {error}"
