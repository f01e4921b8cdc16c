"""The index of a pipeline folder: model_index.json, or modular_model_index.json where it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simpletuner.models.folder.malformed import read_json

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"


def component_source(pair: Sequence[str], name: str, place: str | None, variant: str | None) -> list[Any]:
    """Return a component's entry in a modular index; without a place, diffusers looks in the index's own folder."""
    where = {"pretrained_model_name_or_path": place, "subfolder": name, "variant": variant, "revision": None}
    return [*pair, {"type_hint": pair, **where}]


def index_file(folder: Path) -> Path:
    """Return the index's path; that of model_index.json where the folder has none."""
    plain, modular = folder / INDEX, folder / MODULAR_INDEX
    return modular if modular.is_file() and not plain.is_file() else plain


def read_index(folder: Path) -> dict[str, Any]:
    """Read a folder's index as model_index.json has it, with the library and the class of each component.

    Raises EnvironmentNotReady when it is missing, damaged, or holds no object.
    """
    path = index_file(folder)
    index = read_json(path)
    return {name: library_and_class(value) for name, value in index.items()} if path.name == MODULAR_INDEX else index


def library_and_class(value: Any) -> Any:
    """Return a pair of a component's entry in a modular index; any other value as it is."""
    if not (source := source_of(value)):
        return value
    # Without a class where the component was not loaded when the index was written, and without a place where there is
    # none.
    hint = source.get("type_hint") if source.get("pretrained_model_name_or_path") else None
    return value[:2] if all(value[:2]) else list(hint or (None, None))


def source_of(value: Any) -> dict[str, Any]:
    """Return where a modular index has a component from; nothing for any other value."""
    match value:
        case [_, _, {**source}]:
            return source
    return {}
