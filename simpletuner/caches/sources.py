"""Where the latents and embeddings of a run come from: caches, or encoders that work beside training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simpletuner.caches.encoders import Encoder
from simpletuner.caches.latents import DTYPES, LatentsCache
from simpletuner.caches.mirror import open_mirror
from simpletuner.caches.on_demand import LatentsOnDemand, TextOnDemand
from simpletuner.caches.texts import TextCache
from simpletuner.data.dataset_kinds import ImageDataset, TextEmbeds
from simpletuner.data.folders import latents_folder, text_folder
from simpletuner.data.samples import DatasetSamples, Samples
from simpletuner.models.family import ModelFamily
from simpletuner.models.text_encoding import TextEncoder
from simpletuner.models.vae import Vae
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.world import World
from simpletuner.settings import Settings

LatentsSource = LatentsCache | LatentsOnDemand
TextSource = TextCache | TextOnDemand


@dataclass(frozen=True)
class Sources:
    """Latents and captions by dataset, and prompts, among them the empty one; `vae` and `encoder` make them."""

    latents: dict[str, LatentsSource]
    texts: dict[str, TextSource]
    prompts: TextSource
    vae: Encoder[Vae]
    encoder: Encoder[TextEncoder]

    @property
    def all_texts(self) -> list[TextSource]:
        """Each source of embeddings once, in the same order on all ranks."""
        return list({id(each): each for each in (self.prompts, *self.texts.values())}.values())

    @property
    def caches(self) -> list[LatentsCache | TextCache]:
        both = (*self.all_texts, *self.latents.values())
        return [each for each in both if isinstance(each, LatentsCache | TextCache)]

    @property
    def concurrent_reads(self) -> int:
        """How many samples are best read at once: more than one where records come from a bucket."""
        return max((each.mirror.storage.concurrent_reads for each in self.caches if each.mirror), default=1)


def open_sources(
    settings: Settings, samples: Samples, texts: Sequence[TextEmbeds], family: ModelFamily, world: World
) -> Sources:
    """Return the sources of a run, before they are filled; the default of `texts` comes first."""
    data, datasets, dtype = settings.data, [part.dataset for part in samples.parts], compute_dtype(settings)
    beside = data.text_cache_disable or any(each.text_cache_disable for each in datasets)
    encoder = Encoder(lambda: family.text_encoder(world.device, dtype), world.device, beside)
    vae = Encoder(lambda: family.vae(world.device), world.device, any(each.vae_cache_disable for each in datasets))

    def latents_of(part: DatasetSamples) -> LatentsSource:
        if part.dataset.vae_cache_disable:
            return LatentsOnDemand(vae, DTYPES[data.vae_cache_dtype])
        folder = latents_folder(part.dataset, settings)
        return LatentsCache(folder, part, vae, family, world, open_mirror(part.dataset.latents_bucket, folder))

    def cache_of(embeds: TextEmbeds) -> TextCache:
        own = [part for part in samples.parts if uses(part.dataset, embeds, texts)]
        prompts = all_prompts(settings) if embeds is texts[0] and not data.text_cache_disable else []
        folder, compress = text_folder(embeds, settings), embeds.compress_cache
        return TextCache(folder, own, prompts, encoder, family, world, dtype, compress, open_mirror(embeds, folder))

    def text_of(dataset: ImageDataset) -> TextSource:
        return on_demand if dataset.text_cache_disable else by_id[dataset.text_embeds or texts[0].id]

    on_demand = TextOnDemand(encoder, family)
    by_id: dict[str, TextSource] = {each.id: cache_of(each) for each in used_texts(texts, datasets, settings)}
    return Sources(
        latents={part.dataset.id: latents_of(part) for part in samples.parts},
        texts={each.id: text_of(each) for each in datasets},
        prompts=on_demand if data.text_cache_disable else by_id[texts[0].id],
        vae=vae,
        encoder=encoder,
    )


def used_texts(texts: Sequence[TextEmbeds], datasets: Sequence[ImageDataset], settings: Settings) -> list[TextEmbeds]:
    """Return the caches of text embeddings that hold captions, or prompts, which the first one does."""
    with_prompts = [] if settings.data.text_cache_disable else [texts[0]]
    return [each for each in texts if each in with_prompts or any(uses(one, each, texts) for one in datasets)]


def uses(dataset: ImageDataset, embeds: TextEmbeds, texts: Sequence[TextEmbeds]) -> bool:
    """Whether a dataset's captions are cached there: where it says, else in the first one."""
    return not dataset.text_cache_disable and (dataset.text_embeds or texts[0].id) == embeds.id


def all_prompts(settings: Settings) -> list[str]:
    """Return the prompts of validation, and the empty caption, by which dropped captions are replaced."""
    return [*settings.validation.validation_prompt, settings.validation.validation_negative_prompt, ""]
