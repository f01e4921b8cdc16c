"""Where a run caches what it makes of its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simpletuner.data.datasets import ImageDataset, datasets_of
from simpletuner.settings.sections import Settings


@dataclass(frozen=True)
class CacheFolders:
    """The folders that settings name: those of single datasets, and `roots` that may hold several."""

    latents: list[Path]
    latents_roots: list[Path]
    text: Path


def cache_folders(settings: Settings) -> CacheFolders:
    """Return the cache folders of settings, which need not name pictures. Raises SettingsError as `datasets_of`."""
    named = settings.data.data_backend_config is not None or settings.data.instance_data_dir is not None
    datasets, text = datasets_of(settings.data) if named else ([], settings.data.cache_dir_text)
    roots = [default_folder(settings, "latents"), settings.data.cache_dir_vae]
    return CacheFolders(
        [latents_folder(dataset, settings) for dataset in datasets],
        [root for root in roots if root is not None],
        text_folder(settings, text),
    )


def latents_folder(dataset: ImageDataset, settings: Settings) -> Path:
    """Return the folder of one dataset's latents."""
    root = settings.data.cache_dir_vae or default_folder(settings, "latents")
    return dataset.cache_dir_vae or root / dataset.id


def text_folder(settings: Settings, named: Path | None) -> Path:
    """Return the folder of the text embeddings: the one that flags or the dataset file name, or the run's own."""
    return named or default_folder(settings, "text")


def default_folder(settings: Settings, kind: str) -> Path:
    """Return where a run caches what no setting sends elsewhere."""
    return settings.training.output_dir / "cache" / kind
