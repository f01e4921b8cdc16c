"""The index of a pipeline folder: model_index.json, or modular_model_index.json where it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.models.folder.malformed import read_json

INDEX = "model_index.json"
LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_config.json")
LORA_HINT = "name its base model; --lora_init goes on from a LoRA"
MODULAR_INDEX = "modular_model_index.json"


def component_source(pair: Sequence[str], name: str, place: str | None, variant: str | None) -> list[Any]:
    """Return a component's entry in a modular index; without a place, diffusers looks in the index's own folder."""
    where = {"pretrained_model_name_or_path": place, "subfolder": name, "variant": variant, "revision": None}
    return [*pair, {"type_hint": pair, **where}]


def is_null(value: Any) -> bool:
    """Return whether an entry of an index stands for a component that the folder does not have."""
    return value is None or value == [None, None]


def index_file(folder: Path) -> Path:
    """Return the index's path; that of model_index.json where the folder has none."""
    plain, modular = folder / INDEX, folder / MODULAR_INDEX
    return modular if modular.is_file() and not plain.is_file() else plain


def read_index(folder: Path) -> dict[str, Any]:
    """Read a folder's index as model_index.json has it, with the library and the class of each component.

    Raises EnvironmentNotReady when it is missing, damaged, or holds no object, and SettingsError for a folder of
    something else that a run or diffusers has written.
    """
    path = index_file(folder)
    if not path.exists():
        refuse_other_folder(folder)
    index = read_json(path)
    return {name: library_and_class(value) for name, value in index.items()} if path.name == MODULAR_INDEX else index


def refuse_other_folder(folder: Path) -> None:
    """Raise SettingsError that says what a folder is, where it is a LoRA's, a denoiser's, a checkpoint or a run's."""
    if any((folder / name).is_file() for name in LORA_FILES):
        raise SettingsError(f"{folder} is the folder of a LoRA, not of a model", LORA_HINT)
    if (folder / "config.json").is_file() and (name := read_json(folder / "config.json").get("_class_name")):
        whole = folder.absolute().parent
        where = f"name {whole}" if index_file(whole).is_file() else "name the folder of the pipeline that it is of"
        raise SettingsError(f"{folder} is a {name} alone, which is one part of a pipeline", where)
    if index_file(folder / "pipeline").is_file():
        raise SettingsError(f"{folder} is the folder of a run, not of a model", f"name {folder / 'pipeline'}")
    if (folder / "state.json").is_file() and folder.name.startswith("checkpoint-"):
        raise SettingsError(
            f"{folder} is a checkpoint, not a pipeline", "`simpletuner runs export` writes its pipeline"
        )


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
