"""Prepare the data of a run: samples, buckets, the global batch sampler, cached latents and text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from simpletuner.caches.latents import decoding_threads
from simpletuner.caches.sources import Sources, encodes_during_training, open_sources, used_texts, without_caption
from simpletuner.data.config.dataset_parts import NO_LIMIT, Window
from simpletuner.data.config.dataset_types import ImageDataset, LocalImages, SnapshotImages, UrlImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.config.embeds import TextEmbeds
from simpletuner.data.config.places import default_folder, latents_folder, text_folder
from simpletuner.data.config.validation_prompts import ValidationPrompt, load_prompts
from simpletuner.data.prefetch import FIRST_FRAME, THREADS, SampleReader, named_references, reading_threads
from simpletuner.data.sampler.batch_sampler import BucketSchedule, GlobalBatchSampler
from simpletuner.data.samples.buckets import Buckets, digest_buckets, fill_buckets, make_buckets
from simpletuner.data.samples.dataset_warnings import dataset_warnings, remark_on_rates
from simpletuner.data.samples.discovery import Discovery, discover, format_names
from simpletuner.data.samples.json_captions import JsonCaptions
from simpletuner.data.samples.samples import Samples, held_out_indices, references_of
from simpletuner.data.scan.scan import Scan
from simpletuner.errors import DataError, SettingsError, SimpleTunerError, join_data_errors
from simpletuner.models.catalog.support import check_prompt_sizes, clip_fps, reads_json, trains_sound
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.parallel.world import World
from simpletuner.preparation.plan import Plan, bucket_alignment, check_references, with_first_frames
from simpletuner.preparation.sampled_prompts import SampledPrompt, sampled_prompts
from simpletuner.preparation.shared_scan import scan_datasets
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import Settings
from simpletuner.settings.files.formats import read_text
from simpletuner.system.files.atomic import replace_file
from simpletuner.system.numbers import count_noun

HUB_RECORD = "hub_datasets.json"
"""File in output_dir with the commits of the hub's datasets that a run trains on."""
UNCAPTIONED = "uncaptioned.txt"
"""The list of images without a caption in output_dir."""


@dataclass(frozen=True)
class Prepared:
    """Everything that batches are made of; the plan without images that could not be decoded."""

    plan: Plan
    reader: SampleReader
    validation: list[SampledPrompt]


@dataclass(frozen=True)
class ScannedData:
    """Scans of all datasets."""

    datasets: list[ImageDataset]
    texts: list[TextEmbeds]
    scans: list[Scan]


def scan_data(session: Session, scans_folder: Path | None = None) -> ScannedData:
    """Collective: find the images and compare them with those of the other ranks.

    `scans_folder` is where scans are kept, by default below output_dir. Raises DataError or SettingsError.
    """
    settings = session.settings
    datasets, texts = load_datasets(settings.data, settings.model.model_type)
    record = (scans_folder or settings.training.output_dir) / HUB_RECORD
    world, report, stop, rescan = session.world, session.report, session.stop.check, settings.data.rescan
    if any(isinstance(each, UrlImages | SnapshotImages) for each in datasets):
        from simpletuner.preparation.shared_download import download_datasets

        datasets = download_datasets(datasets, world, report, stop, record, rescan)
    text_folders = [text_folder(each, settings) for each in texts]
    latents_folders = [latents_folder(each, settings) for dataset in datasets for each in dataset.encoded]
    made = {each.id: each for each in datasets if each.prior_images}
    made_folders = [each.instance_data_dir for each in made.values() if isinstance(each, LocalImages)]
    outputs = [settings.training.output_dir, *text_folders, *latents_folders, *made_folders]
    folder = scans_folder or default_folder(settings, "scan")
    conditioning = {each.id: each for dataset in datasets for each in dataset.conditioning}
    searched = [each for each in (*datasets, *conditioning.values()) if each.id not in made]
    scans = scan_datasets(searched, outputs, folder, world, report, stop, rescan, session.background)
    scan_of = {scan.dataset.id: scan for scan in scans}
    if made:
        from simpletuner.preparation.class_images import scan_of_class_images, verify_same_images

        scan_of |= {name: scan_of_class_images(settings, each, scan_of) for name, each in made.items()}
        verify_same_images([scan_of[name] for name in made], world)
    own = [
        replace(scan, conditioning=tuple(scan_of[each.id] for each in scan.dataset.conditioning))
        for scan in (scan_of[each.id] for each in datasets)
    ]
    own = [replace(each, dataset=with_sound(settings, each.dataset)) for each in own]
    return ScannedData([with_sound(settings, each) for each in datasets], texts, own)


def with_sound(settings: Settings, dataset: ImageDataset) -> ImageDataset:
    """Return a dataset whose `video.sound` is true if its clips are trained with their sound."""
    if (clips := dataset.clips) is None:
        return dataset
    trains = trains_sound(settings) and clips.sound is not False
    if not (trains or clips.sound):
        return dataset
    return dataset.model_copy(update={"video": clips.model_copy(update={"sound": trains})})


def plan_data(
    session: Session, scans_folder: Path | None = None, accept: Callable[[Samples], None] = lambda _: None
) -> Plan:
    """Collective: find the images, compare them with those of the other ranks, and group them.

    `scans_folder` is where scans are kept: for a run below output_dir, which also gets the list of images
    without a caption. `accept` may refuse the samples before anything is written there.

    Raises DataError or SettingsError before anything expensive happens.
    """
    settings, data = session.settings, scan_data(session, scans_folder)
    alignment = bucket_alignment(settings, data.datasets, session.world, session.stop.check)
    found = discover(data.scans, alignment, settings.training.seed)
    accept(found.samples)
    if scans_folder is None:
        list_uncaptioned(found, session)
    plan = checked_plan(settings, data, found)
    report_left_out(found, session.report)
    check_json(session, found.samples)
    check_sound(settings, found.samples)  # after what is wrong with the images, which may be why
    rates = (remark_on_rates(scan, clip_fps(settings.model))[1] for scan in found.scans)
    for warning in (*dataset_warnings(found, alignment.width), *filter(None, rates)):
        session.report.warn(warning)
    return in_shared_memory(plan, "plan", session.world, session.stop.check)


def in_shared_memory(plan: Plan, place: str, world: World, stop: Callable[[], None]) -> Plan:
    """Same plan in memory that the ranks of a machine share; `place` is unique in a run. Collective."""
    if world.size == 1:
        return plan
    from simpletuner.preparation.shared_memory import share_memory

    return share_memory(plan, place, world, stop)


def check_json(session: Session, samples: Samples) -> None:
    """Raise DataError for damaged captions of a model that reads JSON; warn of plain ones. Collective."""
    if not reads_json(session.settings.model):
        return

    def look() -> str:  # on one rank: a million captions of 2 KB take 29 s
        found = [JsonCaptions.of(part) for part in samples.parts]
        errors = [(error.message, error.hint) for each in found if (error := each.error())]
        return json.dumps([errors, [each.remark() for each in found]])

    errors, remarks = json.loads(session.world.from_first("captions in JSON", look, session.stop.check))
    if errors:
        raise join_data_errors([DataError(*each) for each in errors])
    for remark in filter(None, remarks):
        session.report.warn(remark)


def check_sound(settings: Settings, samples: Samples) -> None:
    """Raise DataError where sound is to be trained, and no clip has any."""
    if trains_sound(settings) and not any(part.sizes.sounds[part.sizes.index].any() for part in samples.parts):
        raise DataError(
            "sound_loss_weight is set, and no clip of the datasets is known to have a sound track",
            "leave it out; or set `sound` to null in the block `video`, or leave the lengths of videos out of the "
            "table, whose files are not opened (docs/dataset-file.md, Sound)",
        )


def checked_plan(settings: Settings, data: ScannedData, found: Discovery) -> Plan:
    """Return the plan. Raises one error of all that is wrong with captions and buckets."""
    errors: list[SimpleTunerError] = list(found.errors())
    if all(map(len, found.samples.parts)) or not errors:  # else it has been said that no image is left
        try:
            plan = make_plan(settings, data.datasets, data.texts, found.samples)
            if not errors:
                return plan
        except (DataError, SettingsError) as error:
            errors.append(error)
    raise join_data_errors(errors)


def list_uncaptioned(found: Discovery, session: Session) -> None:
    """Write the addresses of all images without a caption into output_dir. Collective, if there are some."""
    path = session.settings.training.output_dir / UNCAPTIONED
    addresses = [scan.storage.describe(name) for scan in found.scans for name in found.uncaptioned[scan.dataset.id]]

    def write() -> str:
        content = "".join(f"{address}\n" for address in addresses)
        replace_file(path, content.encode("utf-8", "surrogateescape"))
        return str(path)

    if addresses:  # all ranks wait for the file: what follows may end the run
        session.world.from_first("uncaptioned", write, session.stop.check)
        if session.world.size > 1:
            session.world.barrier()  # and none may end it while another still asks its store
        session.report.say(f"{count_noun(len(addresses), 'image')} without a caption: {path} lists them")
    elif session.world.is_first:
        path.unlink(missing_ok=True)


def make_plan(settings: Settings, datasets: list[ImageDataset], texts: list[TextEmbeds], samples: Samples) -> Plan:
    """Group samples into buckets that fill the effective batch, and order them."""
    seed, held_out = settings.training.seed, held_out_indices(samples, settings.validation.eval_split)
    trained = [part.dataset for part in samples.parts if part.dataset.dataset_type != "eval"]
    windows = [dataset.window for dataset in trained]

    def make(active: tuple[bool, ...]) -> Buckets:
        ids = {dataset.id for dataset, takes_part in zip(trained, active, strict=True) if takes_part}
        oversubscribe = settings.data.allow_dataset_oversubscription
        return fill_buckets(make_buckets(samples, held_out, ids), settings.effective_batch_size, oversubscribe)

    schedule = BucketSchedule(windows, make)
    buckets = schedule.buckets(0, 0)
    # Ids, not indices: if an image is replaced by another, indices stay the same.
    if set(windows) <= {Window()}:
        sampler = GlobalBatchSampler(buckets, seed)
        digest = digest_buckets(buckets, samples, seed)
    else:
        sampler = GlobalBatchSampler(buckets, seed, schedule)
        check_participation(settings, sampler)
        # Which datasets take part changes while training: the order is identified by the buckets of all
        # of them, and by their windows.
        digest = digest_buckets(make_buckets(samples, held_out), samples, seed, windows)
    return Plan(datasets, texts, samples, buckets, sampler, digest, held_out)


def check_participation(settings: Settings, sampler: GlobalBatchSampler) -> None:
    """Raise SettingsError for steps without a dataset, DataError for buckets that do not fill a batch."""
    steps, epochs = settings.training.max_train_steps, settings.training.num_train_epochs
    if steps is not None:
        sampler.count_steps(NO_LIMIT, settings.effective_batch_size, steps)
    else:
        sampler.count_steps(epochs, settings.effective_batch_size)


def fit_to_model(session: Session, plan: Plan, family: ModelFamily) -> tuple[Plan, list[SampledPrompt]]:
    """Return the plan with what the model is given of each sample, and what validation samples. Collective.

    Raises SettingsError where the data, the prompts and the model do not fit together.
    """
    plan = with_first_frames(plan, family)
    prompts = shared_prompts(session)
    check_references(family, session.settings, plan.datasets, prompts)
    return plan, sampled_prompts(session.settings, plan, prompts)


def prepare(
    session: Session, plan: Plan, family: ModelFamily, writers: ExitStack, sampled: Sequence[SampledPrompt]
) -> Prepared:
    """Collective: encode the captions, images and prompts that are not cached yet, on all ranks.

    Caches that grow while training are written until `writers` is closed.
    """
    settings, report, stop = session.settings, session.report, session.stop.check
    prompts = texts_of(sampled, family)
    sources = open_sources(settings, plan.samples, plan.texts, prompts, family, session.world, writers)
    # Text encoders are freed before the VAE is loaded, so a GPU holds one of them at a time.
    for each in sources.all_texts:
        each.fill(report, stop)
    broken: dict[str, str] = {}
    for paired in sources.paired.values():
        broken |= paired.fill(report, stop)
    sampled = encode_sampled(sampled, family, sources)
    sources.encoder.free()
    for part in plan.samples.parts:
        broken |= sources.latents[part.dataset.id].fill(report, stop)
        for references in references_of(part):
            broken |= references.samples_of(sources.latents[references.dataset.id].fill(report, stop))
    sources.vae.free()
    sources.sound_vae.free()
    report_left_out(Discovery(broken=broken), report)
    if broken:  # headers were read before, so this is the first time that a damaged image body is noticed
        # `broken` is the same on all ranks, so they make the same plan, which sharing relies on.
        whole = plan.samples.without(broken)
        remade = make_plan(settings, plan.datasets, plan.texts, whole)
        plan = in_shared_memory(remade, "plan without broken images", session.world, stop)
    on_demand = [
        decoding_threads(part, session.world) for part in plan.samples.parts if encodes_during_training(part.dataset)
    ]
    at_once = sources.concurrent_reads
    reader = SampleReader(
        samples=plan.samples,
        dataset=plan.samples.dataset_of,
        latents=lambda sample: sources.latents[sample.dataset].read(sample),
        image=lambda sample: {
            **family.size_conditioning(sample.geometry),
            **named_references(sources.latents[each.dataset].read(each) for each in sample.references),
            **({FIRST_FRAME: sources.latents[sample.dataset].read_first_frame(sample)} if sample.is_i2v else {}),
        },
        text=sources.text,
        no_caption=sources.no_caption,
        skips_first_frame=family.skips_first_frame,
        mask=lambda sample: sources.latents[sample.dataset].read_mask(sample),
        streams=lambda sample: sources.latents[sample.dataset].read_streams(sample),
        threads=max([THREADS, *on_demand]),
        # Threads pay where each read waits for a network; a local cache is read without their overhead.
        map_samples=reading_threads(at_once, "samples").map if at_once > 1 else map,
    )
    return Prepared(plan, reader, sampled)


def encode_sampled(sampled: Sequence[SampledPrompt], family: ModelFamily, sources: Sources) -> list[SampledPrompt]:
    """Add embeddings to the prompts: cached, or computed in memory where text encoders read references."""

    def read(each: SampledPrompt, text: str) -> Conditioning:
        if not family.reads_references:
            return sources.prompts.record(text)
        with sources.encoder.use() as encoder:
            return {name: value[0] for name, value in encoder.encode([text], each.references).items()}

    def negative(each: SampledPrompt) -> Conditioning:
        text = each.negative_prompt
        return read(each, text) if text else without_caption(family, read(each, text))

    return [each.encoded(read(each, each.prompt.prompt), negative(each)) for each in sampled]


def shared_prompts(session: Session) -> list[ValidationPrompt]:
    """Prompts of validation, as rank 0 reads them: all ranks must sample the same images. Collective."""
    if not (session.settings.validation.samples_images or session.settings.validation.validation_images):
        return []
    world, stop = session.world, session.stop.check
    prompts = load_prompts(
        session.settings.validation, lambda path: world.from_first("prompt file", lambda: read_text(path), stop)
    )
    check_prompt_sizes(session.settings, prompts)
    return prompts


def texts_of(sampled: Sequence[SampledPrompt], family: ModelFamily) -> list[str]:
    """Texts to cache for validation, and the empty caption, by which dropped captions are replaced.

    There are none where text encoders read references: those of validation are encoded at each start.
    """
    if family.reads_references:
        return []
    own = [text for each in sampled for text in (each.prompt.prompt, each.negative_prompt)]
    return [*dict.fromkeys(own), ""]


def report_left_out(found: Discovery, report: Report) -> None:
    """Name images that are left out, with the reason. Their files are never touched."""
    for address in (address for others in found.others for address in others.written):
        report.say(f"{address} is left out of the images: this run writes there")
    if found.unwanted:
        report.say(f"{count_noun(found.unwanted, 'image')} outside the limits of size or aspect left out")
    if found.other_lengths:
        videos = count_noun(found.other_lengths, "video")
        report.say(f"{videos} shorter than min_frames or a clip, or longer than max_frames left out")
    if found.skipped:
        report.say(f"{count_noun(found.skipped, 'image')} without a caption left out")
    if found.surplus:
        report.say(f"{count_noun(found.surplus, 'image')} left out by max_num_samples")
    if found.broken:
        named = format_names([f"{name}: {reason}" for name, reason in sorted(found.broken.items())])
        report.warn(f"{count_noun(len(found.broken), 'broken image')} left out:{named}")


def folders_of(settings: Settings, plan: Plan) -> list[Path]:
    texts = [text_folder(each, settings) for each in used_texts(plan.texts, plan.datasets, settings)]
    encoded = [each for dataset in plan.datasets for each in dataset.encoded]
    return [*texts, *(latents_folder(each, settings) for each in encoded if not each.vae_cache_disable)]
