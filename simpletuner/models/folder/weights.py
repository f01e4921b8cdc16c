"""Files of a pipeline folder: its index, safetensors of one variant, its commit in the hub's cache.

A pickle is never read, whatever its name. The index is model_index.json, or modular_model_index.json if it is
alone. A folder of the hub's cache is `models--OWNER--NAME/snapshots/COMMIT`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.folder.malformed import CHECK_COPY, read_json
from simpletuner.system.files.regular_files import open_regular

INDEX = "model_index.json"
LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_config.json")
LORA_HINT = "name its base model; --lora_init goes on from a LoRA"
MODULAR_INDEX = "modular_model_index.json"


def component_source(pair: Sequence[str], name: str, place: str | None, variant: str | None) -> list[Any]:
    # Without a place, diffusers looks in the index's own folder.
    where = {"pretrained_model_name_or_path": place, "subfolder": name, "variant": variant, "revision": None}
    return [*pair, {"type_hint": pair, **where}]


def is_null(value: object) -> bool:
    """True if an index entry stands for a component that the folder does not have."""
    return value is None or value == [None, None]


def index_file(folder: Path) -> Path:
    """Path of the index; of model_index.json if the folder has none."""
    plain, modular = folder / INDEX, folder / MODULAR_INDEX
    return modular if modular.is_file() and not plain.is_file() else plain


def read_index(folder: Path) -> dict[str, Any]:
    """Read a folder's index as model_index.json has it, with the library and the class of each component.

    Raises EnvironmentNotReady when it is missing, damaged, or holds no object, and SettingsError for a folder
    of something else that a run or diffusers has written.
    """
    path = index_file(folder)
    if not path.exists():
        refuse_other_folder(folder)
    index = read_json(path)
    return {name: library_and_class(value) for name, value in index.items()} if path.name == MODULAR_INDEX else index


def refuse_other_folder(folder: Path) -> None:
    """Raise SettingsError naming the kind of a folder: a LoRA, a denoiser, a checkpoint or a run."""
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
    # Without a class where the component was not loaded when the index was written, and without a place where
    # there is none.
    hint = source.get("type_hint") if source.get("pretrained_model_name_or_path") else None
    return value[:2] if all(value[:2]) else list(hint or (None, None))


def source_of(value: object) -> dict[str, Any]:
    """Source of a component in a modular index; empty for any other value."""
    match value:
        case [_, _, {**source}]:
            return source
    return {}


# Suffixes of configs, weights, vocabularies and chat templates: all that is fetched, read or exported.
COMPONENT_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")

# First bytes of files for `torch.load` or `pickle.load`: zip archives, and pickles since protocol 2.
PICKLE_STARTS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def weights_files(folder: Path, variant: str | None = None) -> list[Path]:
    """List a component's safetensors of one variant. Raises EnvironmentNotReady without any."""
    every = sorted(folder.glob("*.safetensors"))
    files = [path for path in every if variant_of(path) == variant]
    if files:
        return files
    pickles = [path.name for path in sorted(folder.iterdir()) if is_pickle(path)] if folder.is_dir() else []
    if pickles:
        raise EnvironmentNotReady(
            f"{folder} holds {pickles[0]}, a pickle: loading it can run any code, so it is refused",
            "convert it once to safetensors with a tool that you trust",
        )
    others = sorted({variant_of(path) or "no variant" for path in every})
    raise EnvironmentNotReady(
        f"{folder} holds no safetensors" + (f" of variant {variant}" if variant else ""),
        f"found: {', '.join(others)}; set --variant" if others else "check pretrained_model_name_or_path",
    )


def is_pickle(path: Path) -> bool:
    """True for a pickle, by its name or its first bytes."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        return True
    if path.suffix == ".safetensors" or not path.is_file():
        return False  # a file of that name is read by safetensors alone, which runs no code
    with open_regular(path) as file:
        return file.read(4).startswith(PICKLE_STARTS)


def belongs_to_component(path: Path) -> bool:
    # A pickle is never loaded.
    return path.suffix in COMPONENT_SUFFIXES and not is_pickle(path)


def refuse_special_files(folder: Path) -> None:
    """Raise EnvironmentNotReady for a FIFO, device or broken link: libraries would wait for it."""
    components = [folder / name for name in read_index(folder)]
    for path in sorted(path for component in components if component.is_dir() for path in component.iterdir()):
        if not (path.is_file() or path.is_dir()):
            what = "is a link that leads nowhere" if path.is_symlink() else "is not a regular file"
            raise EnvironmentNotReady(f"{path} {what}", CHECK_COPY)


def refuse_pickles(folder: Path) -> None:
    """Raise EnvironmentNotReady if a component has its weights in pickles only, or names one."""
    # Libraries read whatever file an index, or `transformers_weights` in a config, names.
    for component in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(is_pickle(path) for path in component.iterdir()):
            any_weights_files(component)
        for index in sorted(component.rglob("*.index.json")):
            check_weight_map(index, read_json(index).get("weight_map"))
        if (component / "adapter_config.json").exists():
            raise EnvironmentNotReady(f"{component} holds an adapter, which is not read", "merge it into the weights")
        config = component / "config.json"
        named = read_json(config).get("transformers_weights") if config.is_file() else None
        if named is not None and not str(named).endswith(".index.json"):  # that index is among those above
            check_weight_map(config, {"transformers_weights": named})


def check_weight_map(path: Path, weight_map: object) -> None:
    """Raise EnvironmentNotReady unless an index names only safetensors files in its own folder."""
    if not isinstance(weight_map, dict):
        raise EnvironmentNotReady(f"{path} has no weight_map: it is no index of weights", CHECK_COPY)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise EnvironmentNotReady(
                f"{path} names {name!r} for {tensor}: weights are read only from safetensors files in its folder",
                "convert the model once to safetensors with a tool that you trust",
            )


def any_weights_files(folder: Path) -> list[Path]:
    """List a component's safetensors of no variant, or else of whichever variant there is."""
    variants = [variant_of(path) for path in sorted(folder.glob("*.safetensors"))]
    return weights_files(folder, variants[0] if variants and None not in variants else None)


def variant_of(path: Path) -> str | None:
    """The variant in a weights file's name (`model.fp16-00001-of-00002.safetensors` -> fp16), or None."""
    _, dot, rest = path.name.removesuffix(".safetensors").partition(".")
    return rest.partition("-")[0] if dot else None


# Name of the fact in a run's summary and checkpoints: `OWNER/NAME@COMMIT`.
BASE_COMMIT = "base commit"
COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(folder: Path) -> str:
    """Return the commit that a folder is of; empty for a folder outside of the hub's cache."""
    return folder.name if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) else ""


def repository_of(folder: Path) -> str:
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/")


def commit_in(fact: str, repository: str) -> str:
    """Return the commit of a recorded fact; empty where it is of another repository, or none at all."""
    name, _, commit = fact.rpartition("@")
    return commit if name == repository and COMMIT.fullmatch(commit) else ""
