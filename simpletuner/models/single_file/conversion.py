"""Read a model in one file, in its original layout, by diffusers, and keep it as a pipeline folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.folder.diffusers_io import choose_accelerator, component_class, diffusers_class
from simpletuner.models.folder.index import read_index
from simpletuner.models.folder.malformed import reason
from simpletuner.models.folder.safetensors_dtypes import DTYPES
from simpletuner.models.folder.weights import COMPONENT_SUFFIXES
from simpletuner.models.single_file.source import MARKER, read_header, source_of

VAE_STARTS = ("first_stage_model.", "vae.")
TEXT_STARTS = ("cond_stage_model.", "conditioner.", "text_encoders.")
"""With which the names of the tensors of a VAE and of text encoders begin in such a file."""
SAME_ARCHITECTURE = "set single_file_config to a folder of the same architecture"


def convert(path: Path, config: Path, folder: Path, denoiser: str) -> None:
    """Read a file by diffusers and save it as a pipeline. Downloads nothing; weights keep the file's dtype.

    `denoiser` is the name of that component. Raises EnvironmentNotReady for a component that neither the file nor the
    folder of configs has.
    """
    choose_accelerator()
    names, dtype = read_header(path)
    if any(name.startswith((*VAE_STARTS, *TEXT_STARTS)) for name in names):
        convert_pipeline(path, config, folder, names, DTYPES[dtype])
    else:
        convert_denoiser(path, config, folder, denoiser, DTYPES[dtype])
    (folder / MARKER).write_text(json.dumps(source_of(path, config), indent=2), encoding="utf-8")


def convert_pipeline(path: Path, config: Path, folder: Path, names: Sequence[str], dtype: torch.dtype) -> None:
    """Convert a file with text encoders or a VAE; what it lacks of these is read from the folder."""
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    index = read_index(config)
    given: dict[str, Any] = {}
    if not any(name.startswith(VAE_STARTS) for name in names) and any((config / "vae").glob("*.safetensors")):
        given["vae"] = component_class(index, "vae", config).from_pretrained(config / "vae", torch_dtype=dtype)
    cls = single_file_class(diffusers_class(str(index.get("_class_name"))))
    try:
        with explaining_missing_weights(path, config):
            pipeline = cls.from_single_file(
                str(path), config=str(config), local_files_only=True, torch_dtype=dtype, **given
            )
    except SingleFileComponentError as error:
        raise EnvironmentNotReady(
            f"{path} and {config} together are no whole {cls.__name__}: {reason(error)}",
            "set single_file_config to a folder that holds the weights of the components which the file does not have",
        ) from None
    for name, component in pipeline.components.items():
        refuse_missing_weights(component, name, path, config)
    pipeline.save_pretrained(folder, safe_serialization=True)


def convert_denoiser(path: Path, config: Path, folder: Path, name: str, dtype: torch.dtype) -> None:
    """Convert a file that holds the denoiser alone; all other components are linked or copied from the folder."""
    components = [part for part in config.iterdir() if part.is_dir() and part.name != name]
    missing = [part.name for part in components if (part / "config.json").exists() and not has_weights(part)]
    if missing:
        raise EnvironmentNotReady(
            f"{path} holds a {name} alone, and {config} has no weights of {', '.join(sorted(missing))}",
            "set single_file_config to a folder that holds the weights of all other components",
        )
    cls = single_file_class(component_class(read_index(config), name, config))
    with explaining_missing_weights(path, config):
        denoiser = cls.from_single_file(
            str(path), config=str(config), subfolder=name, local_files_only=True, torch_dtype=dtype
        )
    refuse_missing_weights(denoiser, name, path, config)
    denoiser.save_pretrained(folder / name, safe_serialization=True)
    shutil.copyfile(config / "model_index.json", folder / "model_index.json")
    for part in components:
        (folder / part.name).mkdir()
        for file in part.iterdir():
            if file.suffix in COMPONENT_SUFFIXES:
                link_or_copy(file, folder / part.name / file.name)


def single_file_class(cls: Any) -> Any:
    """Raises EnvironmentNotReady for a class that diffusers cannot read from one file."""
    if not hasattr(cls, "from_single_file"):
        raise EnvironmentNotReady(
            f"diffusers cannot read a {cls.__name__} from one file", "give a folder in diffusers format"
        )
    return cls


def has_weights(component: Path) -> bool:
    return any(component.glob("*.safetensors"))


@contextmanager
def explaining_missing_weights(path: Path, config: Path) -> Iterator[None]:
    """Raise EnvironmentNotReady where diffusers looks for a name that the file does not have."""
    try:
        yield
    except (LookupError, NotImplementedError):  # the latter: torch cannot copy what is still on the meta device
        raise EnvironmentNotReady(
            f"{path} lacks weights that {config} asks for: it is not whole, or of another architecture",
            SAME_ARCHITECTURE,
        ) from None


def refuse_missing_weights(component: Any, name: str, path: Path, config: Path) -> None:
    """Raise EnvironmentNotReady for a weight of a model that was not read, which is still on the meta device."""
    tensors = component.state_dict() if isinstance(component, torch.nn.Module) else {}
    if missing := next((weight for weight, tensor in tensors.items() if tensor.is_meta), None):
        raise EnvironmentNotReady(
            f"{path} lacks {missing} of {name}: it is of another architecture than {config}", SAME_ARCHITECTURE
        )


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name; where that cannot be, such as on another file system, copy it."""
    try:
        os.link(source.resolve(), target)  # what links to the hub's cache may be removed from there
    except OSError:
        shutil.copyfile(source, target)
