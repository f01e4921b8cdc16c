"""Multiples of which buckets are: for model_family=auto the VAE says by how much clips differ in length."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from simpletuner.counting.clip_lengths import frame_step_of
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.models.catalog.registry import AUTO
from simpletuner.models.catalog.support import check_clips
from simpletuner.models.folder.malformed import read_config, translate_load_errors
from simpletuner.models.opening.loading import fetch_files, local_folder
from simpletuner.models.single_file.source import named_file
from simpletuner.parallel.world import World
from simpletuner.settings import Settings
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.values.shape import Shape

VAE_CONFIG = "vae/config.json"


def bucket_alignment(
    settings: Settings, datasets: Iterable[ImageDataset], world: World, stop: Callable[[], None]
) -> Shape:
    """Collective: return what sides of buckets, and frames of clips but one, are multiples of.

    Raises SettingsError for videos and a family that cannot train them.
    """
    datasets = list(datasets)
    alignment = check_clips(settings, datasets)
    if settings.model.model_family != AUTO or not any(dataset.clips for dataset in datasets):
        return alignment
    step = world.from_first("lengths of clips", lambda: str(step_of_vae(settings.model)), stop)
    return alignment._replace(frames=int(step))


def step_of_vae(model: Model) -> int:
    """Frame step of clips in a base model; only the config of its VAE is fetched."""
    is_file = named_file(model) is not None
    folder = model.single_file_config if is_file else local_folder(model) or fetch_files(model, [VAE_CONFIG])
    assert folder is not None
    with translate_load_errors(folder / VAE_CONFIG):
        return frame_step_of(read_config(folder / VAE_CONFIG))
