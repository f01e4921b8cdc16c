"""The denoiser that settings name, without building or downloading it: diffusers' class and config. No torch.

Parameters are counted from the headers of its weights, or taken from the published number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.catalog.preset import Architecture
from simpletuner.models.catalog.registry import (
    TINY,
    check_model,
    flavour_of,
    flavours_of,
    preset_of,
    repository_named,
    revision_of,
    tiny_architecture,
)
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.regular_files import open_regular, read_file

DENOISERS = ("transformer", "unet")
# Bytes; the longest that safetensors itself reads.
LONGEST_HEADER = 100_000_000


def parameters_of(model: Model) -> tuple[int, str] | None:
    """Number of parameters and its source; None if it cannot be known without loading the denoiser."""
    base = Path(model.pretrained_model_name_or_path)
    if model.pretrained_model_name_or_path and base.is_dir():
        folder = next((base / name for name in DENOISERS if (base / name).is_dir()), base)
        count = sum(map(parameters_in, weights_of_variant(folder.glob("*.safetensors"), model.variant)))
        return (count, f"counted in {folder}") if count else None
    if (tiny := tiny_architecture(model)) is not None and tiny.parameters is not None:
        return tiny.parameters, f"of {tiny.source}"
    flavour = flavour_of(model)
    if flavour is None or flavour.architecture.parameters is None:
        return None
    return flavour.architecture.parameters, f"as published for {model.model_family}"


def copied_bytes(base: Path) -> int:
    """Bytes of weights that an exported pipeline copies from a base model: all but the denoiser's."""
    files = [path for path in base.glob("*/*.safetensors") if path.parent.name not in DENOISERS and path.is_file()]
    return sum(path.stat().st_size for path in files)


def weights_of_variant(files: Iterable[Path], variant: str | None) -> list[Path]:
    """Files of one variant; without a variant, those that have no dot in their stem."""
    # Such as model.fp16.safetensors, and model.fp16-00001-of-00002.safetensors of several.
    marked = f".{variant}" if variant else ""
    return [path for path in files if (marked in path.stem if marked else "." not in path.stem)]


def parameters_in(path: Path) -> int:
    """Count a safetensors file's elements by its header, which has every shape; 0 if damaged."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0


CONFIGS = (*(f"{name}/config.json" for name in DENOISERS), "config.json")
"""Paths of the denoiser's config in a pipeline's folder, or in the denoiser's own."""

WEIGHTS_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf", ".sft")
"""Ends of the names of models in one file."""


def architecture_of(model: Model, warn: Callable[[str], None]) -> Architecture:
    """The denoiser as the folder has it, else the local hub cache, else as published with the flavour.

    Raises SettingsError for a model that is not known or no folder, EnvironmentNotReady for a folder with no
    denoiser.
    """
    name = model.pretrained_model_name_or_path
    if name and (folder := Path(name).expanduser()).is_dir():
        return architecture_in_folder(folder)
    if is_path(name):
        raise SettingsError(f"{name} is no folder", "check pretrained_model_name_or_path")
    if not name:
        check_named(model)
    return architecture_in_hub_cache(repository_named(model), revision_of(model)) or published_architecture(model, warn)


def folder_of(model: Model) -> str:
    """The absolute path of the folder that the settings name, or what they name if it is none."""
    name = model.pretrained_model_name_or_path
    folder = Path(name).expanduser()
    return str(folder.resolve()) if name and folder.is_dir() else name


# Ids of the hub have no other letters: neither the backslash of Windows nor the `@` of a revision.
ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def is_path(name: str) -> bool:
    # Hub ids are NAME or OWNER/NAME, never a file of weights.
    is_file = Path(name).suffix.lower() in WEIGHTS_SUFFIXES
    return bool(name) and (is_file or name.startswith((".", "-")) or not ID.fullmatch(name))


def architecture_in_folder(folder: Path) -> Architecture:
    """The denoiser in a pipeline's folder, or in its own. Raises EnvironmentNotReady if there is none."""
    for path in (folder / name for name in CONFIGS):
        if path.is_file():
            return architecture_in_config(path)
    raise EnvironmentNotReady(
        f"{folder} holds neither {', nor '.join(CONFIGS)}",
        "pretrained_model_name_or_path must be a pipeline's or a denoiser's folder in diffusers format",
    )


def check_named(model: Model) -> None:
    """Raise SettingsError if no family is named, or none that is known."""
    if not model.model_family:
        raise SettingsError(
            "no model: set model_family, or pretrained_model_name_or_path to a folder",
            "`simpletuner models` lists all families",
        )
    check_model(model)


def architecture_in_hub_cache(name: str, revision: str | None) -> Architecture | None:
    """The denoiser of an earlier download from the hub; None if there is none, or if it cannot tell."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if not name or not (Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        return None  # the usual case; the import below takes 0.1 s
    from huggingface_hub import try_to_load_from_cache

    for config in CONFIGS:
        path = try_to_load_from_cache(name, config, revision=revision)
        if isinstance(path, str):
            with suppress(EnvironmentNotReady):  # such as the config.json of another library
                return architecture_in_config(Path(path))
    return None


def architecture_in_config(path: Path) -> Architecture:
    """The denoiser that a config.json describes. Raises EnvironmentNotReady if it describes none."""
    try:
        config: Any = json.loads(read_file(path))
    except OSError as error:
        raise EnvironmentNotReady(f"cannot read {path}: {error.strerror}", "copy or download the model again") from None
    except (ValueError, RecursionError) as error:
        raise EnvironmentNotReady(f"cannot read {path}: {error}", "copy or download the model again") from None
    class_name = config.get("_class_name") if isinstance(config, dict) else None
    if not isinstance(class_name, str):
        raise EnvironmentNotReady(
            f"{path} names no _class_name: it is no model of diffusers", "check pretrained_model_name_or_path"
        )
    return Architecture(class_name, source=str(path), config=config)


def published_architecture(model: Model, warn: Callable[[str], None]) -> Architecture:
    """The denoiser of the flavour that has this hub id, else of the chosen one, else of the family's default.

    Raises SettingsError where nothing is published, EnvironmentNotReady where what is published is not known.
    """
    check_named(model)
    if (tiny := tiny_architecture(model)) is not None:
        return tiny
    name, flavours = model.pretrained_model_name_or_path, flavours_of(model.model_family)
    if not flavours or (model.model_flavour == TINY and not name):
        why = "it is a family of your own" if preset_of(model) is None else "no published checkpoint is known"
        raise SettingsError(
            f"the denoiser of {model.model_family} is not known without a folder: {why}",
            "set pretrained_model_name_or_path to a pipeline's folder (a tiny run leaves one in its output_dir)",
        )
    same = next((flavour for flavour in flavours.values() if flavour.hub == name), None)
    chosen = same or flavours.get(model.model_flavour) or next(iter(flavours.values()))
    if name and same is None:
        warn(f"{name} is neither a folder nor in the local hub cache: this is {chosen.hub}, as published")
    if chosen.architecture.parameters is None:
        raise EnvironmentNotReady(
            f"the denoiser of {chosen.hub} is not known without its files, which are not on this machine",
            f"download it (`hf download {chosen.hub}`), or name a pipeline folder with --pretrained_model_name_or_path",
        )
    return chosen.architecture
