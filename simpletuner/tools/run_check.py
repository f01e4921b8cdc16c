"""Checks of a run that need no torch, in one place.

`train`, `train --dry_run` and `config validate` call it, so they find the same and warn of the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.errors import DataError, EnvironmentNotReady, SimpleTunerError, collect_error, join_errors
from simpletuner.settings import Loaded, Settings
from simpletuner.settings.declared.errors import InvalidSettings, shorten
from simpletuner.settings.declared.sections import Checkpoints
from simpletuner.settings.files.raw_values import Origin, Source, naming_places, with_places
from simpletuner.settings.resolving.loading import resolve
from simpletuner.settings.rules.effects import without_effect
from simpletuner.settings.values.parsed import check_installed
from simpletuner.system.files.paths import shown_path

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_types import ImageDataset

MODEL_SETTINGS = ("model_family", "model_flavour", "model_families", "pretrained_model_name_or_path")


def load_run(sources: Iterable[Source], complete: bool = True) -> Loaded:
    """Merge the sources of a run; unless `complete`, what a run cannot do without may be missing.

    Raises SettingsError that lists all mistakes, those of its model and its dataset file included, the one
    that decides first: with another model the rest may be no mistakes.
    """
    try:
        return resolve(sources, complete)
    except InvalidSettings as error:
        raise join_errors(errors_around(error)) from None


def errors_around(error: InvalidSettings) -> list[SimpleTunerError]:
    """Add to the mistakes of settings what is wrong with the model and the files that they name."""
    model, data = error.settings.model, error.settings.data
    before: list[SimpleTunerError] = []
    after: list[SimpleTunerError] = []
    if model.model_family and error.invalid.isdisjoint(MODEL_SETTINGS):
        from simpletuner.models.catalog.support import check_with_model

        with collect_error(before):
            check_with_model(error.settings, error.origins)
    if data.data_backend_config is not None:
        from simpletuner.data.config.datasets import load_datasets

        with collect_error(after), naming_places(error.origins, "data_backend_config"):
            load_datasets(data, model.model_type)
    collect_named_files(error.settings, error.origins, after)
    return [*before, error, *after]


def check_run(loaded: Loaded) -> Loaded:
    """Settings with all warnings about them. Raises SimpleTunerError that lists all that stops the run."""
    checked, errors = examine_run(loaded)
    if errors:
        raise join_errors(errors)
    return checked


def examine_run(loaded: Loaded) -> tuple[Loaded, list[SimpleTunerError]]:
    """Return the settings with all warnings about them, and all that stops the run."""
    from simpletuner.data.config.datasets import load_datasets
    from simpletuner.launch.plan import visible_gpus
    from simpletuner.models.catalog.architecture import parameters_of
    from simpletuner.models.catalog.support import check_clips, check_runnable

    settings = loaded.settings
    errors: list[SimpleTunerError] = []
    datasets = []
    texts = []
    with collect_error(errors):
        loaded = check_runnable(loaded)
    with collect_error(errors), naming_places(loaded.origins, "data_backend_config", "instance_data_dir", "resolution"):
        datasets, texts = load_datasets(settings.data, settings.model.model_type)
    counted = None if errors else parameters_of(settings.model)
    with collect_error(errors), naming_places(loaded.origins, "gpu_ids"):
        visible_gpus(settings.launch)
    collect_named_files(settings, loaded.origins, errors)
    with collect_error(errors), naming_places(loaded.origins, "offload_param_path"):
        about_data = () if errors else warnings_about_data(loaded, datasets)  # it reads the dataset file again
        loaded = replace(loaded, warnings=(*loaded.warnings, *about_data))
        if settings.parallel.zero_stage is not None:
            from simpletuner.deepspeed.requirements import check_settings

            of_deepspeed = check_settings(settings, counted and counted[0])
            loaded = replace(loaded, warnings=(*loaded.warnings, *of_deepspeed))
    file = settings.data.data_backend_config
    for check in (
        lambda: check_clips(settings, datasets),
        lambda: check_image_folders(datasets, file),
        lambda: check_buckets([*datasets, *texts, *(each.latents_bucket for each in datasets)]),
    ):
        with collect_error(errors), naming_places(loaded.origins, "data_backend_config", "instance_data_dir"):
            check()
    return loaded, errors


def warnings_about_data(loaded: Loaded, datasets: Sequence[ImageDataset]) -> Iterator[str]:
    """Yield a sentence for each setting and key of the dataset file without effect on these datasets."""
    from simpletuner.data.config.datasets import data_facts

    if loaded.settings.data.data_backend_config is not None:
        from simpletuner.data.config.dataset_parsing import unused_keys

        yield from unused_keys(loaded.settings.data, loaded.origins)
    for rule in without_effect(loaded.settings, loaded.origins, data_facts(datasets)):
        yield str(with_places(rule, loaded.origins))


def collect_named_files(settings: Settings, origins: Mapping[str, Origin], errors: list[SimpleTunerError]) -> None:
    """Add an error for each secret, checkpoint, file of prompts and the like that cannot be used."""
    from simpletuner.launch.store import message_signer

    with collect_error(errors), naming_places(origins, "report_to"):
        check_installed(settings.logging.report_to)
    with collect_error(errors), naming_places(origins, "run_secret_file"):
        message_signer(settings.launch.run_secret_file)
    if settings.validation.samples_images or settings.validation.validation_images:
        from simpletuner.data.config.validation_prompts import load_prompts
        from simpletuner.models.catalog.support import check_prompt_sizes

        with collect_error(errors), naming_places(origins, "validation_prompt_file"):
            check_prompt_sizes(settings, load_prompts(settings.validation))
    with collect_error(errors), naming_places(origins, "push_to_hub"):
        check_hub_token(settings)
    root, wanted = settings.training.output_dir / "checkpoints", settings.checkpoints
    if wanted.mirror_output:
        from simpletuner.data.config.places import mirror_place
        from simpletuner.data.storage.storage import check_obstore

        with collect_error(errors), naming_places(origins, "mirror_output"):
            check_obstore(mirror_place(wanted.mirror_output))
    with collect_error(errors), naming_places(origins, "output_dir", "resume_from_checkpoint"):
        check_checkpoint(root, wanted)


def check_checkpoint(root: Path, wanted: Checkpoints) -> None:
    """Raise SettingsError where the checkpoint to resume from is missing."""
    if wanted.resume_from_checkpoint == "none" or (wanted.resume_from_checkpoint == "latest" and not root.exists()):
        return
    from simpletuner.checkpoints.layout import NAME, find_resume_folders  # 7 ms, which no new run needs

    if not (wanted.mirror_output and NAME.fullmatch(wanted.resume_from_checkpoint)):  # the bucket may have it
        find_resume_folders(root, wanted.resume_from_checkpoint)


def check_hub_token(settings: Settings) -> None:
    """Raise EnvironmentNotReady for an upload without a token, which would fail when all is done."""
    if settings.hub.push_to_hub:
        from huggingface_hub import get_token

        if get_token() is None:
            raise EnvironmentNotReady("push_to_hub needs a token of the hub", "`hf auth login`, or set HF_TOKEN")


def check_buckets(places: Iterable[object]) -> None:
    """Raise EnvironmentNotReady where a bucket needs a package, for images or for caches."""
    from simpletuner.data.config.places import BucketPlace
    from simpletuner.data.storage.storage import check_obstore

    for place in places:
        if isinstance(place, BucketPlace):
            check_obstore(place)


def check_image_folders(datasets: Sequence[ImageDataset], file: Path | None) -> None:
    """Raise DataError for missing folders and tables, EnvironmentNotReady where videos cannot be read.

    `file` is the one that names the datasets.
    """
    errors: list[SimpleTunerError] = []
    for dataset in datasets:
        with collect_error(errors):
            check_images_of(dataset, f"{shown_path(file)}: " if file else "")
    if errors:
        raise join_errors(errors)


def check_images_of(dataset: ImageDataset, place: str) -> None:
    from simpletuner.data.config.dataset_parts import table_files
    from simpletuner.data.config.dataset_types import BucketImages, LocalImages, SnapshotImages, UrlImages
    from simpletuner.data.images.image_formats import check_av

    # A folder of class images is made with them.
    folder = dataset.instance_data_dir if isinstance(dataset, LocalImages) and not dataset.prior_images else None
    if isinstance(dataset, SnapshotImages) and not dataset.is_on_hub:
        folder = dataset.dataset_name
    if folder is not None and not folder.is_dir():
        raise DataError(
            f"{place}dataset `{dataset.id}`: there is no folder {shorten(str(folder))}",
            f"set {'dataset_name' if isinstance(dataset, SnapshotImages) else 'instance_data_dir'} to your images",
        )
    if folder is not None and next(folder.iterdir(), None) is None:
        raise DataError(
            f"{place}dataset `{dataset.id}`: {shorten(str(folder))} is empty", f"put {dataset.noun}s into it first"
        )
    if dataset.clips:
        check_av(dataset.id)
    table = dataset.csv_file if isinstance(dataset, UrlImages) else dataset.parquet and dataset.parquet.path
    is_local = table and (table.is_absolute() or not isinstance(dataset, BucketImages))
    if table and is_local and not any(each.is_file() for each in table_files(table)):
        raise DataError(
            f"{place}dataset `{dataset.id}`: there is no table {shorten(str(table))}",
            f"set {'csv_file' if isinstance(dataset, UrlImages) else 'parquet.path'} to it",
        )
