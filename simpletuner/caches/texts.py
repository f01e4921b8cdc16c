"""Text embeddings: each caption encoded once, by all ranks.

For text encoders that also read the references of a sample, there is one record per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL.Image import Image
from torch import Tensor

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.fill import CacheMode, RecordSource, cache_mode
from simpletuner.caches.latents import decoding_threads
from simpletuner.caches.store.records import KeyParts, folder_fingerprint, reference_parts, short_hash, text_parts
from simpletuner.caches.workers import CacheJob, CacheRequest, Made
from simpletuner.data.images.images import DECODE_ERRORS
from simpletuner.data.samples.dataset_summary import different_captions
from simpletuner.data.samples.samples import DatasetSamples, Sample, reference_images
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning, TextEncoder, has_clip, is_cleaned
from simpletuner.models.folder.diffusers_io import text_folders
from simpletuner.parallel.world import World

if TYPE_CHECKING:
    from simpletuner.caches.store.mirror import Mirror


class TextSource(RecordSource[str, str]):
    """The embeddings of some datasets' captions and of some prompts, named by the hash of the text."""

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
        mode: CacheMode,
        writers: ExitStack,
    ) -> None:
        parts, cleans = key_parts(family, dtype), has_clip(family.index)

        def request(caption: str) -> CacheRequest:
            # Earlier commits have cached what CLIP's tokenizer makes of these texts without cleaning them.
            cleaned = {"cleaning": "CLIP's"} if cleans and is_cleaned(caption) else {}
            return CacheRequest(short_hash(caption), parts | cleaned)

        def digest() -> str:
            return short_hash([[each.checksum("name", "captions") for each in samples], list(prompts), parts, cleans])

        def make(chunk: Sequence[str]) -> list[Mapping[str, Tensor]]:
            with encoder.use() as model:
                encoded = without_padding(family, model.encode(chunk))
            return [{key: value[number] for key, value in encoded.items()} for number in range(len(chunk))]

        chunk = family.settings.data.text_encoder_batch_size
        listed = partial(different_captions, samples, prompts)
        job = CacheJob("captions", folder, digest, chunk, listed, request, str, make, compress=compress, mirror=mirror)
        super().__init__(job, mode, encoder, world, writers)


def key_parts(family: ModelFamily, dtype: torch.dtype) -> KeyParts:
    encoders = folder_fingerprint(text_folders(family.folder))
    return {**text_parts(encoders, str(dtype), family.max_length), **family.cache_facts}


def without_padding(family: ModelFamily, encoded: Conditioning) -> Conditioning:
    # The denoiser ignores padding, and records do not store zeros.
    if not family.padding_mask:
        return encoded
    is_padding = encoded[family.padding_mask].unsqueeze(-1) == 0
    return encoded | {"prompt_embeds": encoded["prompt_embeds"].masked_fill(is_padding, 0)}


Loaded = tuple[tuple[str, ...], tuple[Image, ...]] | str
"""Captions and references of a sample, or why these cannot be decoded."""


class PairedTexts(RecordSource[Sample, Loaded]):
    """The embeddings of all captions of each sample, and of its empty caption, all of them one record."""

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
        parts, dataset = key_parts(family, dtype), samples.dataset

        def request(sample: Sample) -> CacheRequest:
            own = {**parts, "captions": short_hash(sample.captions), **reference_parts(sample)}
            return CacheRequest(sample.id, own)

        def make(loaded: Sequence[Loaded]) -> list[Made]:
            return [each if isinstance(each, str) else encode_sample(*each) for each in loaded]

        def encode_sample(texts: tuple[str, ...], references: tuple[Image, ...]) -> Mapping[str, Tensor]:
            with encoder.use() as model:
                each = [without_padding(family, model.encode([text], references)) for text in texts]
            return {f"{number}.{name}": value[0] for number, own in enumerate(each) for name, value in own.items()}

        job = CacheJob(
            title="captions with references",
            folder=folder,
            digest=lambda: short_hash([samples.checksum("name", "version", "captions"), parts]),
            chunk=1,  # all texts of a batch are about the same references
            items=lambda: samples,
            request=request,
            load=load,
            make=make,
            threads=decoding_threads(samples, world),
            compress=compress,
            mirror=mirror,
        )
        mode = cache_mode(dataset.text_cache_disable, dataset.text_cache_ondemand)
        super().__init__(job, mode, encoder, world, writers)

    def read(self, sample: Sample, caption: str) -> Conditioning:
        """Return the embedding of one of a sample's captions, or of the empty one, without a batch axis."""
        prefix = f"{texts_of(sample).index(caption)}."
        record = self.record(sample)
        return {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}


def texts_of(sample: Sample) -> tuple[str, ...]:
    # The empty text is that of a dropped caption.
    return (*sample.captions, "")


def load(sample: Sample) -> Loaded:
    try:
        return texts_of(sample), reference_images(sample)
    except DECODE_ERRORS as error:
        return f"its reference: {error}"
