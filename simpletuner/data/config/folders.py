"""Ids of datasets and the cache folders that are named after them: below one folder, each its own, safe to print."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.values.placeholders import fill
from simpletuner.system.files.paths import ENVIRONMENT

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_types import ImageDataset
    from simpletuner.data.config.embeds import TextEmbeds

# Of each part of a path, on the usual file systems.
MAX_NAME_BYTES = 255
WITH_REFERENCES = "with-references"
"""Ends the names of folders for embeddings by text encoders that read references, too."""


def latents_folder(dataset: ImageDataset, settings: Settings) -> Path:
    if dataset.cache_dir_vae is None:
        return latents_root(settings) / dataset.id
    return fill(dataset.cache_dir_vae, {**run_values(settings), "id": dataset.id})


def latents_root(settings: Settings) -> Path:
    """Return the folder for the latents of all datasets that do not name one of their own."""
    return fill(settings.data.cache_dir_vae or default_folder(settings, "latents"), run_values(settings))


def text_folder(texts: TextEmbeds, settings: Settings) -> Path:
    return fill(texts.cache_dir, {**run_values(settings), "id": texts.id})


def paired_folder(texts: TextEmbeds, dataset: ImageDataset, settings: Settings) -> Path:
    """Return the folder for embeddings of a dataset's captions by text encoders that read its references, too."""
    return paired_root(texts, settings) / dataset.id


def paired_root(texts: TextEmbeds, settings: Settings) -> Path:
    folder = text_folder(texts, settings)
    return folder.with_name(f"{folder.name}-{WITH_REFERENCES}")


def run_values(settings: Settings) -> dict[str, object]:
    """Return the values of names in braces in the path of a cache folder."""
    return {"model_family": settings.model.model_family, "output_dir": settings.training.output_dir}


def default_folder(settings: Settings, kind: str) -> Path:
    return settings.training.output_dir / "cache" / kind


def check_id(name: str) -> str:
    """Return a dataset's id. Raises ValueError for one that is not a relative path below a folder."""
    parts = name.split("/")
    if not name.strip():
        raise ValueError("an id cannot be empty")
    if ENVIRONMENT.search(name):
        raise ValueError("an id cannot hold {env:NAME}: it is the name of a cache, which must not change")
    if any(is_control(letter) for letter in name):
        raise ValueError("an id cannot hold control characters")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError("its cache would not be in a folder of its own: use a plain name, such as `photos`")
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise ValueError(f"an id has at most {MAX_NAME_BYTES} bytes")
    return name


def is_control(letter: str) -> bool:
    """Return whether a letter is a control character or a lone surrogate, which stands for an undecodable byte."""
    return unicodedata.category(letter) in ("Cc", "Cs")


def id_of_folder(name: str) -> str:
    return "".join("_" if is_control(letter) else letter for letter in name) or "images"


def find_nested_ids(names: Sequence[str]) -> list[str]:
    """Return a sentence for each id whose folder is inside that of another one."""
    paths = {name: PurePosixPath(name) for name in names}
    return [
        f"the cache of dataset `{inner}` would be inside that of `{outer}`: rename one of them"
        for outer in paths
        for inner in paths
        if inner != outer and paths[inner].is_relative_to(paths[outer])
    ]
