"""Files of kohya's sd-scripts and of diffusion-pipe for `simpletuner config import`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.commands.config.import_writing import (
    DATASETS,
    after_what_is_lost,
    beside_of,
    write_datasets,
    write_run,
)
from simpletuner.data.config.dataset_file import DatasetEntry
from simpletuner.data.config.foreign.original_datasets import ImportedDatasets, import_datasets
from simpletuner.data.config.foreign.other_datasets import (
    Lost,
    kohya_entries,
    of_all_datasets,
    pipe_entries,
    with_different_ids,
)
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.support import check_runnable
from simpletuner.settings.declared.sections import Data
from simpletuner.settings.files.formats import read_entries, suffix_of
from simpletuner.settings.foreign.recognition import KOHYA, flat, import_hint, is_dataset_file, trainer_of, untranslated
from simpletuner.settings.importing.original_files import LeftOut, Original
from simpletuner.settings.importing.other_trainers import translate_kohya, translate_pipe
from simpletuner.settings.importing.sorting import first_existing, take_translated
from simpletuner.settings.importing.toml import sources_of
from simpletuner.settings.resolving.loading import resolve


def other_trainer(path: Path) -> tuple[str, dict[str, Any]]:
    """Return whose TOML file this is, and what it holds; nothing for other files.

    Raises SettingsError for a file of a program whose files have no translation.
    """
    if path.is_dir() or suffix_of(path) not in (".toml", ".json", ".yaml", ".yml"):
        return "", {}
    try:
        values = {entry.key: entry.value for entry in read_entries(path)}
    except SettingsError:
        if suffix_of(path) == ".toml":
            raise
        return "", {}  # the reader of the original's files, or of a list of datasets, says what is wrong
    if other := untranslated(values):
        raise SettingsError(f"{path} is a file of {other}", import_hint(path, other))
    trainer = trainer_of(values) if suffix_of(path) == ".toml" else ""
    return trainer, values if trainer else {}


def import_their_datasets(path: Path, values: Mapping[str, Any], output: Path | None, partial: bool) -> None:
    """Write a dataset TOML of another trainer as a list of datasets."""
    write_datasets(path, their_datasets(path, values, Data()), output, partial)


def their_datasets(
    path: Path, values: Mapping[str, Any], data: Data, training: Mapping[str, Any] | None = None
) -> ImportedDatasets:
    lost: list[Lost] = []
    is_kohya = "datasets" in values
    entries = with_different_ids((kohya_entries if is_kohya else pipe_entries)(values, lost, training))
    if training is None and not is_kohya:
        lost.append(("resolutions", values.get("resolutions"), "set aspect_bucket_alignment=16, as there", "look"))
    found = import_datasets([DatasetEntry.of(entry, path) for entry in entries], path, data, Path(), {})
    missing = [LeftOut(name, value, str(path), reason, effect) for name, value, reason, effect in lost]
    return ImportedDatasets(found.entries, [*missing, *found.left_out], True)


def import_their_run(
    path: Path, values: Mapping[str, Any], trainer: str, output: Path | None, force: bool, partial: bool
) -> None:
    """Write the training TOML of another trainer, and the dataset TOML that it names, as files of ours."""
    found = (translate_kohya if trainer == KOHYA else translate_pipe)(values)
    original = Original(path, [], is_simpletuner=False)
    datasets = None
    with after_what_is_lost(original, partial):
        if found.datasets:
            file = first_existing(found.datasets, (Path(), path.parent))
            if file is None or output is None:
                message = f"{path} names datasets in {found.datasets}, which become a file of their own"
                raise SettingsError(message, "check that path" if output else "give --output=run.toml")
            _, listed = other_trainer(file)
            if not is_dataset_file(listed):
                raise SettingsError(f"{file} lists no datasets as {trainer} has them", "name its dataset TOML")
            training = flat(values)
            datasets = their_datasets(file, listed, Data(), training)
            original.left_out += datasets.left_out
            found.own[DATASETS] = str(beside_of(output))
            if trainer == KOHYA:
                # sd-scripts has both per dataset, here they are settings of the run.
                own = {"train_batch_size": ("batch_size", 1), "aspect_bucket_alignment": ("bucket_reso_steps", 64)}
                known = {**training, "batch_size": training.get("train_batch_size", 1)}
                found.own |= {ours: of_all_datasets(listed, *theirs, known, found.lost) for ours, theirs in own.items()}
                found.settings = [each for each in found.settings if each[0] != "train_batch_size"]
        take_translated(original, found, trainer)
        loaded = check_runnable(resolve(sources_of(original, {})))
    write_run(original, loaded, datasets, Path(), output, force)
