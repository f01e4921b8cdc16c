"""Sources of latents and embeddings: caches, or encoders that run during training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.fill import RecordSource, cache_mode
from simpletuner.caches.latents import LatentsSource
from simpletuner.caches.texts import PairedTexts, TextSource
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.config.embeds import BucketEmbeds, Embeds, TextEmbeds
from simpletuner.data.config.places import latents_folder, paired_folder, text_folder
from simpletuner.data.samples.samples import DatasetSamples, References, Sample, Samples, references_of
from simpletuner.data.storage.storage import check_obstore
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning, TextEncoder
from simpletuner.models.family.vae import Vae
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.world import World
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Data

if TYPE_CHECKING:
    from simpletuner.caches.store.mirror import Mirror
    from simpletuner.models.family.sound import SoundVae


@dataclass(frozen=True)
class Sources:
    """Latents and captions by dataset, and prompts with the empty one, made by `vae` and `encoder`."""

    latents: dict[str, LatentsSource]
    texts: dict[str, TextSource]
    paired: dict[str, PairedTexts]
    """Text embeddings by dataset, instead of `texts`, for text encoders that read the references."""
    prompts: TextSource
    family: ModelFamily
    vae: Encoder[Vae]
    sound_vae: Encoder[SoundVae]
    encoder: Encoder[TextEncoder]

    def text(self, sample: Sample, caption: str) -> Conditioning:
        """Return the embedding of a sample's caption, without a batch axis."""
        if sample.dataset in self.paired:
            return self.paired[sample.dataset].read(sample, caption)
        return self.texts[sample.dataset].record(caption)

    def no_caption(self, sample: Sample) -> Conditioning:
        """Return the embedding for a dropped caption, without a batch axis."""
        if sample.dataset in self.paired:
            return without_caption(self.family, self.text(sample, ""))
        return self._no_caption

    @cached_property
    def _no_caption(self) -> Conditioning:
        return without_caption(self.family, self.prompts.record(""))

    @property
    def all_texts(self) -> list[TextSource]:
        """Sources of embeddings without repetition, in the same order on all ranks."""
        # By identity, in a fixed order: filling is collective, so all ranks must take the caches one after
        # the other alike.
        return list({id(each): each for each in (self.prompts, *self.texts.values())}.values())

    @property
    def caches(self) -> list[RecordSource[Any, Any]]:
        """Sources whose records are stored."""
        every = (*self.all_texts, *self.paired.values(), *self.latents.values())
        return [each for each in every if each.mode != "uncached"]

    @property
    def concurrent_reads(self) -> int:
        """Best number of concurrent reads: more than one where records come from a bucket."""
        mirrors = [each.job.mirror for each in self.caches]
        return max((each.storage.concurrent_reads for each in mirrors if each), default=1)


def open_sources(
    settings: Settings,
    samples: Samples,
    texts: Sequence[TextEmbeds],
    prompts: Sequence[str],
    family: ModelFamily,
    world: World,
    writers: ExitStack,
) -> Sources:
    """Return the sources of a run, before they are filled; the default of `texts` comes first, and holds
    `prompts`.

    Those that store what is encoded while training are written until `writers` is closed.
    """
    data, datasets, dtype = settings.data, [part.dataset for part in samples.parts], compute_dtype(settings)
    beside = any(each.text_cache_disable or each.text_cache_ondemand for each in (data, *datasets))
    encoder = Encoder(lambda: family.text_encoder(world.device, dtype), world.device, beside)
    # One VAE and one set of text encoders for all datasets; each is loaded at its first use.
    while_training = any(map(encodes_during_training, datasets))
    vae = Encoder(lambda: family.vae(world.device), world.device, while_training)
    sound_vae = Encoder(lambda: family.sound_vae(world.device), world.device, while_training)

    def latents_of(part: DatasetSamples | References) -> LatentsSource:
        folder = latents_folder(part.dataset, settings)
        mirror = None if part.dataset.vae_cache_disable else open_mirror(part.dataset.latents_bucket, folder)
        return LatentsSource(folder, part, vae, sound_vae, family, world, writers, mirror)

    # Datasets that name the same cache share one object, which is filled once and held open once.
    @cache
    def cache_of(number: int, disable: bool, ondemand: bool) -> TextSource:
        embeds = texts[number]
        using = [part for part in plain if uses(part.dataset, embeds, texts)]
        own = [part for part in using if part.dataset.text_cache_ondemand == ondemand]
        # Validation prompts are cached with the default's captions, once, not in each cache.
        own_prompts = prompts if number == 0 and holds_prompts(settings, ondemand) else []
        folder, mode, compress = text_folder(embeds, settings), cache_mode(disable, ondemand), embeds.compress_cache
        mirror = None if disable else open_mirror(embeds, folder)
        return TextSource(folder, own, own_prompts, encoder, family, world, dtype, compress, mirror, mode, writers)

    def text_of(given: ImageDataset | Data) -> TextSource:
        if given.text_cache_disable:
            return cache_of(0, True, False)
        named = given.text_embeds if isinstance(given, ImageDataset) else None
        return cache_of(number_of[named or texts[0].id], False, given.text_cache_ondemand)

    plain = [part for part in samples.parts if not reads_images(family, part)]
    number_of = {each.id: number for number, each in enumerate(texts)}
    return Sources(
        latents={each.dataset.id: latents_of(each) for part in samples.parts for each in (part, *references_of(part))},
        texts={part.dataset.id: text_of(part.dataset) for part in plain},
        paired=open_paired(settings, samples, texts, encoder, family, world, writers),
        prompts=text_of(data),
        family=family,
        vae=vae,
        sound_vae=sound_vae,
        encoder=encoder,
    )


def open_paired(
    settings: Settings,
    samples: Samples,
    texts: Sequence[TextEmbeds],
    encoder: Encoder[TextEncoder],
    family: ModelFamily,
    world: World,
    writers: ExitStack,
) -> dict[str, PairedTexts]:
    """Texts of datasets whose images the text encoders read, by dataset, before they are filled."""
    by_id, dtype, paired = {each.id: each for each in texts}, compute_dtype(settings), dict[str, PairedTexts]()
    for part in samples.parts:
        if reads_images(family, part):
            dataset = part.dataset
            embeds = by_id[dataset.text_embeds or texts[0].id]
            folder, compress = paired_folder(embeds, dataset, settings), embeds.compress_cache
            mirror = None if dataset.text_cache_disable else open_mirror(embeds.of_pairs(dataset), folder)
            paired[dataset.id] = PairedTexts(folder, part, encoder, family, world, dtype, compress, mirror, writers)
    return paired


def reads_images(family: ModelFamily, part: DatasetSamples) -> bool:
    return family.reads_references and bool(part.references or part.dataset.is_i2v)


def without_caption(family: ModelFamily, empty: Conditioning) -> Conditioning:
    """Conditioning for `no caption`, given the embedding of the empty one; both without a batch axis."""
    found = family.unconditional({name: value[None] for name, value in empty.items()})
    return {name: value[0] for name, value in found.items()}


def encodes_during_training(dataset: ImageDataset) -> bool:
    return dataset.vae_cache_disable or dataset.vae_cache_ondemand


def holds_prompts(settings: Settings, ondemand: bool) -> bool:
    """True if the prompts are in the write-through cache (`ondemand`), or in the filled one."""
    return not settings.data.text_cache_disable and settings.data.text_cache_ondemand == ondemand


def used_texts(texts: Sequence[TextEmbeds], datasets: Sequence[ImageDataset], settings: Settings) -> list[TextEmbeds]:
    """Return the caches of text embeddings that hold captions, or prompts, which the first one does."""
    with_prompts = [] if settings.data.text_cache_disable else [texts[0]]
    return [each for each in texts if each in with_prompts or any(uses(one, each, texts) for one in datasets)]


def uses(dataset: ImageDataset, embeds: TextEmbeds, texts: Sequence[TextEmbeds]) -> bool:
    """True if a dataset's captions are cached there: in the cache that it names, else the first one."""
    return not dataset.text_cache_disable and (dataset.text_embeds or texts[0].id) == embeds.id


def open_mirror(embeds: Embeds | None, folder: Path) -> Mirror | None:
    """Return the local copy of a cache; None if it is not in a bucket. Nothing is asked of the server yet."""
    if not isinstance(embeds, BucketEmbeds):
        return None
    from simpletuner.caches.store.mirror import Mirror
    from simpletuner.data.storage.object_storage import open_bucket

    check_obstore(embeds)
    return Mirror(folder, open_bucket(embeds), int(embeds.cache_size_limit_gb * 1e9))
