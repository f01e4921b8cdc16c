"""From settings to data that can be trained on: samples, buckets, cached latents and text, the global order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletuner.caches.keys import short_hash
from simpletuner.caches.latents import LatentsCache
from simpletuner.caches.texts import TextCache
from simpletuner.data.batch_sampler import GlobalBatchSampler
from simpletuner.data.batch_sampler_v1 import GlobalBatchSamplerV1
from simpletuner.data.buckets import Buckets, filled, group
from simpletuner.data.dataset_warnings import dataset_warnings
from simpletuner.data.datasets import ImageDataset, datasets_of
from simpletuner.data.discovery import Found, Sample, counted, discover, listed
from simpletuner.data.folders import latents_folder, text_folder
from simpletuner.data.prefetch import SampleReader
from simpletuner.data.version import VERSION
from simpletuner.models.family import Family
from simpletuner.parallel.engine import compute_dtype
from simpletuner.parallel.same_data import verify_same_data
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Settings


@dataclass(frozen=True)
class Plan:
    """What there is to train on, before anything is encoded."""

    datasets: list[ImageDataset]
    samples: list[Sample]
    buckets: Buckets
    text_folder: Path
    order: GlobalBatchSampler
    digest: str
    """Identity of seed, buckets and order: a position means something only for the same ones."""
    version: int


@dataclass(frozen=True)
class Prepared:
    """Everything that batches are made of; the plan without pictures that could not be decoded."""

    plan: Plan
    source: SampleReader
    text: TextCache


def plan_data(session: Session, version: int = VERSION) -> Plan:
    """Find the pictures, compare them with those of the other ranks, and group them. Collective.

    Raises DataError or SettingsError before anything expensive happens.
    """
    settings = session.settings
    datasets, text_named = datasets_of(settings.data)
    text, alignment_px = text_folder(settings, text_named), settings.data.aspect_bucket_alignment
    written = [settings.training.output_dir, text, *(latents_folder(dataset, settings) for dataset in datasets)]
    found = discover(datasets, alignment_px, settings.training.seed, written, version)
    tell_left_out(found, session.report)
    for remark in dataset_warnings(found, datasets, alignment_px):
        session.report.warn(remark)
    samples = verify_same_data(found, datasets, session.world, session.stop.check)
    return plan_of(settings, datasets, samples, text, version)


def plan_of(
    settings: Settings, datasets: list[ImageDataset], samples: list[Sample], text_folder: Path, version: int
) -> Plan:
    """Group samples into buckets that fill the effective batch, and order them."""
    repeats = {dataset.id: dataset.repeats for dataset in datasets}
    oversubscribe = settings.data.allow_dataset_oversubscription
    buckets = filled(group(samples, repeats), settings.effective_batch_size, oversubscribe)
    seed = settings.training.seed
    contents = {name: [samples[index].id for index in items] for name, items in buckets.items()}
    identity = [seed, contents] if version == 1 else [version, seed, contents]
    order = GlobalBatchSamplerV1(buckets, seed) if version == 1 else GlobalBatchSampler(buckets, seed)
    return Plan(datasets, samples, buckets, text_folder, order, short_hash(identity), version)


def prepare(session: Session, plan: Plan, family: Family) -> Prepared:
    """Encode captions and pictures on all ranks, whatever is not cached yet."""
    settings, world, report, stop = session.settings, session.world, session.report, session.stop.check
    prompts = [*settings.validation.validation_prompt, settings.validation.validation_negative_prompt, ""]
    captions = [caption for sample in plan.samples for caption in sample.captions]
    text = TextCache(plan.text_folder, [*captions, *prompts], family, world, compute_dtype(settings))
    text.fill(settings.data.text_encoder_batch_size, report, stop)
    caches = {dataset.id: latents_cache(dataset, settings, plan.samples, family, world) for dataset in plan.datasets}
    broken: dict[str, str] = {}
    for cache in caches.values():
        broken |= cache.fill(settings.data.vae_batch_size, report, stop)
    tell_left_out(Found(broken=broken), report)
    whole = [sample for sample in plan.samples if sample.id not in broken]
    if broken:
        plan = plan_of(settings, plan.datasets, whole, plan.text_folder, plan.version)
    no_caption = family.unconditional({key: value[None] for key, value in text.read("").items()})
    source = SampleReader(
        samples=whole,
        latents=lambda sample: caches[sample.dataset].read(sample),
        picture=lambda sample: family.picture_conditioning(sample.geometry),
        text=text.read,
        no_caption={key: value[0] for key, value in no_caption.items()},
    )
    return Prepared(plan, source, text)


def latents_cache(
    dataset: ImageDataset, settings: Settings, samples: Sequence[Sample], family: Family, world: World
) -> LatentsCache:
    """Return the cache of one dataset's latents."""
    own = [sample for sample in samples if sample.dataset == dataset.id]
    return LatentsCache(latents_folder(dataset, settings), own, family, world, settings.model.vae_dtype)


def tell_left_out(found: Found, report: Report) -> None:
    """Name pictures that are left out, with the reason; they are never touched."""
    for folder in found.written:
        report.say(f"{folder} is left out of the pictures: this run writes there")
    if found.unwanted:
        report.say(f"{counted(found.unwanted, 'picture')} outside the limits of size or aspect left out")
    if found.broken:
        named = listed([f"{name}: {reason}" for name, reason in sorted(found.broken.items())])
        report.warn(f"{counted(len(found.broken), 'broken picture')} left out:{named}")


def pictures_in_buckets(plan: Plan) -> str:
    """Return how many pictures are in which buckets, and how often an epoch shows those that are repeated."""
    counts = {name: (len(set(items)), len(items)) for name, items in plan.buckets.items()}
    told = [f"{name}: {own}{f' shown {shown} times' if shown > own else ''}" for name, (own, shown) in counts.items()]
    return f"{len(plan.samples):,} in {counted(len(counts), 'bucket')} ({', '.join(told)})"


def folders_of(settings: Settings, plan: Plan) -> list[Path]:
    """Return the folders that cache what a plan needs."""
    return [plan.text_folder, *(latents_folder(dataset, settings) for dataset in plan.datasets)]
