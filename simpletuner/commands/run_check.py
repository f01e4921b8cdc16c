"""All that can be known to be wrong with a run before torch is imported, in one place.

`train`, `train --dry_run` and `config validate` call it, so they find the same and warn of the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from simpletuner.errors import DataError, SettingsError
from simpletuner.settings import Loaded, Settings

if TYPE_CHECKING:
    from simpletuner.data.datasets import ImageDataset


def check_run(loaded: Loaded) -> Loaded:
    """Return the settings with all warnings about them. Raises SimpleTunerError for what stops the run."""
    from simpletuner.data.datasets import load_datasets
    from simpletuner.deepspeed.requirements import check_settings
    from simpletuner.launch.plan import visible_gpus
    from simpletuner.models.parameter_count import parameters_of
    from simpletuner.models.support import check_runnable

    loaded = check_runnable(loaded)
    settings = loaded.settings
    datasets, _ = load_datasets(settings.data)
    visible_gpus(settings.launch)
    check_named_files(settings)
    counted = parameters_of(settings.model)
    warnings = check_settings(settings, counted and counted[0])
    check_image_folders(datasets)
    return replace(loaded, warnings=(*loaded.warnings, *warnings))


def check_named_files(settings: Settings) -> None:
    """Raise SettingsError for a secret, or a checkpoint to start from, that is not there or cannot be used."""
    from simpletuner.checkpoints.layout import find_resume_folders, list_checkpoints
    from simpletuner.launch.store import message_signer

    message_signer(settings.launch.run_secret_file)
    root, wanted = settings.training.output_dir / "checkpoints", settings.checkpoints
    find_resume_folders(root, wanted.resume_from_checkpoint)
    source = wanted.import_deepspeed_checkpoint
    if source is not None and not source.is_dir() and not list_checkpoints(root):
        message = f"import_deepspeed_checkpoint = {source}: there is no such folder"
        raise SettingsError(message, "name the folder that DeepSpeed's save_checkpoint was given")


def check_image_folders(datasets: Sequence[ImageDataset]) -> None:
    """Raise DataError for an image folder that does not exist."""
    for dataset in datasets:
        if not dataset.instance_data_dir.is_dir():
            raise DataError(
                f"dataset `{dataset.id}`: there is no folder {dataset.instance_data_dir}",
                "set instance_data_dir to your images",
            )
