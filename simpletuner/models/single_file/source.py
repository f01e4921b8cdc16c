"""A base model in one file of the original layout: which file, and whether it is converted. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.sections import Model

# In the folder made of a file: the name of that file.
MARKER = "single_file.json"
LORA_PARTS = (".lora_", ".lora.", "lora_unet_", "lora_te_", "lora_te1_", ".lokr_", ".hada_", ".oft_")
# As safetensors calls them; others were rounded to eight bits or less.
FULL_DTYPES = ("F32", "F16", "BF16")


def named_file(model: Model) -> Path | None:
    """File that the base model is; None for a folder or a hub id. Raises SettingsError for a pickle."""
    path = Path(model.pretrained_model_name_or_path).expanduser()
    if not path.is_file():
        return None
    from simpletuner.models.folder.weights import PICKLE_SUFFIXES  # which imports the hub's library

    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise SettingsError(
            f"{path} is a pickle: loading it can run any code, so it is refused",
            "use the .safetensors of the same model, or convert it once with a tool that you trust",
        )
    return path if path.suffix.lower() == ".safetensors" else None


def check_single_file(model: Model) -> None:
    """Raise SettingsError for a file without a folder of configs, a LoRA and rounded weights.

    Raises EnvironmentNotReady for a damaged file.
    """
    path, config = named_file(model), model.single_file_config
    if path is None:
        return
    names, dtype = read_header(path)
    if any(part in name for name in names for part in LORA_PARTS):
        from simpletuner.models.folder.weights import LORA_HINT  # which imports the hub's library

        raise SettingsError(f"{path} is a LoRA, not a model", LORA_HINT)
    if config is None:
        raise SettingsError(
            f"{path} is a model in one file, which holds no configs and no tokenizers",
            "set single_file_config to a diffusers folder of the same architecture (docs/single-file.md)",
        )
    if not (config / "model_index.json").is_file():
        raise SettingsError(
            f"single_file_config = {config} has no model_index.json", "name a diffusers folder (docs/single-file.md)"
        )
    if dtype not in FULL_DTYPES:
        raise SettingsError(
            f"{path} holds {dtype} weights, which were rounded for inference", "take the file in bf16, fp16 or fp32"
        )


def read_header(path: Path) -> tuple[list[str], str]:
    """Return the names of a file's tensors, and the dtype of the largest, as safetensors calls it.

    Raises EnvironmentNotReady for a damaged file.
    """
    from safetensors import safe_open

    from simpletuner.models.folder.malformed import translate_load_errors

    with translate_load_errors(path), safe_open(path, framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        if not slices:
            raise ValueError("it holds no tensors")
        largest = max(slices.values(), key=lambda each: math.prod(each.get_shape()))
        return list(slices), largest.get_dtype()


def source_of(path: Path, config: Path) -> dict[str, Any]:
    """Identity of the converted file and its config: another file of this name is converted again."""
    from simpletuner.models.folder.malformed import read_json

    status = path.stat()
    return {
        "file": str(path.absolute()),
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "config": str(config.absolute()),
        "index": read_json(config / "model_index.json"),
    }


def is_converted(folder: Path, source: Mapping[str, object]) -> bool:
    from simpletuner.models.folder.malformed import read_json

    return (folder / MARKER).is_file() and read_json(folder / MARKER) == source
