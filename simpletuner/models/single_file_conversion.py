"""Read a model in one file, in its original layout, by diffusers, and keep it as a pipeline folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.diffusers_io import component_class, diffusers_class
from simpletuner.models.malformed import read_json, reason
from simpletuner.models.single_file import MARKER, source_of

VAE_STARTS = ("first_stage_model.", "vae.")
"""With which the names of a VAE's tensors begin in such a file."""


def convert(path: Path, config: Path, folder: Path) -> None:
    """Read a file by diffusers and save it as a pipeline. Downloads nothing; weights keep the file's dtype.

    Raises EnvironmentNotReady for a component that neither the file nor the folder of configs has.
    """
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    index = read_json(config / "model_index.json")
    names, dtype = read_header(path)
    given: dict[str, Any] = {}
    if not any(name.startswith(VAE_STARTS) for name in names) and any((config / "vae").glob("*.safetensors")):
        given["vae"] = component_class(index, "vae", config).from_pretrained(config / "vae", torch_dtype=dtype)
    cls = diffusers_class(str(index.get("_class_name")))
    if not hasattr(cls, "from_single_file"):
        raise EnvironmentNotReady(
            f"diffusers cannot read a {cls.__name__} from one file", "give a folder in diffusers format"
        )
    try:
        pipeline = cls.from_single_file(
            str(path), config=str(config), local_files_only=True, torch_dtype=dtype, **given
        )
    except SingleFileComponentError as error:
        raise EnvironmentNotReady(
            f"{path} and {config} together are no whole {cls.__name__}: {reason(error)}",
            "set single_file_config to a folder that holds the weights of the components which the file does not have",
        ) from None
    except NotImplementedError:  # torch cannot copy what is still on the meta device
        raise EnvironmentNotReady(
            f"{path} lacks weights that {config} asks for: it is not whole, or of another architecture",
            "set single_file_config to a folder of the same architecture",
        ) from None
    for name, component in pipeline.components.items():
        if missing := missing_weights(component):
            raise EnvironmentNotReady(
                f"{path} lacks {missing} of {name}: it is of another architecture than {config}",
                "set single_file_config to a folder of the same architecture",
            )
    pipeline.save_pretrained(folder, safe_serialization=True)
    (folder / MARKER).write_text(json.dumps(source_of(path, config), indent=2), encoding="utf-8")


def read_header(path: Path) -> tuple[list[str], torch.dtype]:
    """Return the names of a file's tensors, and the dtype of most of its values."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        largest = max(names, key=lambda name: torch.Size(file.get_slice(name).get_shape()).numel())
        return names, file.get_tensor(largest).dtype


def missing_weights(component: Any) -> str:
    """Return a weight of a model that was not read, which is still on the meta device; empty where there is none."""
    if not isinstance(component, torch.nn.Module):
        return ""
    return next((name for name, tensor in component.state_dict().items() if tensor.is_meta), "")
