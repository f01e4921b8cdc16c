"""Open a pipeline folder in diffusers format: where it is, what its configs say, and that nothing in it is a pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.errors import EnvironmentFault, SettingsError
from simpletuner.models.registry import TINY, published_name
from simpletuner.settings.sections import Model

if TYPE_CHECKING:
    from torch import nn

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WANTED_FROM_HUB = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md"]


def local_folder(model: Model) -> Path | None:
    """Return the pipeline folder if it is on this machine: a path that the user gave. None: it is on the hub."""
    path = Path(model.pretrained_model_name_or_path).expanduser()
    return path if model.pretrained_model_name_or_path and path.is_dir() else None


def downloaded(model: Model) -> Path:
    """Return the folder of a published pipeline, downloading what is missing.

    Raises EnvironmentFault when the hub does not have it or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = model.pretrained_model_name_or_path or published_name(model)
    try:
        return Path(snapshot_download(name, revision=model.revision, allow_patterns=WANTED_FROM_HUB))
    except HFValidationError:
        raise SettingsError(f"{name} is neither a folder nor a hub id", "check pretrained_model_name_or_path") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFault(
            f"cannot fetch {name} from the hub: {reason}",
            "give a local folder with --pretrained_model_name_or_path, or try --model_flavour=tiny without any download",
        ) from None


def needs_building(model: Model) -> bool:
    """Return whether the model is the locally built tiny one."""
    return model.model_flavour == TINY and not model.pretrained_model_name_or_path


def read_json(path: Path) -> dict[str, Any]:
    """Read a component's JSON file. Raises EnvironmentFault when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"cannot read {path}: {error}", "pretrained_model_name_or_path must be a pipeline folder in diffusers format"
        ) from None


def text_folders(folder: Path) -> list[Path]:
    """Return the folders that decide what a caption's embedding is: tokenizers and text encoders."""
    return sorted(path for path in folder.iterdir() if path.name.startswith(("tokenizer", "text_encoder")))


def weights_files(folder: Path, variant: str | None = None) -> list[Path]:
    """Return the safetensors of one component, of one variant.

    Raises EnvironmentFault when there are none; a pickle is named and refused, since loading it can run code.
    """
    every = sorted(folder.glob("*.safetensors"))
    files = [path for path in every if variant_of(path) == variant]
    if files:
        return files
    pickles = [path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES] if folder.is_dir() else []
    if pickles:
        raise EnvironmentFault(
            f"{folder} holds {pickles[0]}, a pickle: loading it can run any code, so it is refused",
            "convert it once to safetensors with a tool that you trust",
        )
    others = sorted({variant_of(path) or "no variant" for path in every})
    raise EnvironmentFault(
        f"{folder} holds no safetensors" + (f" of variant {variant}" if variant else ""),
        f"found: {', '.join(others)}; set --variant" if others else "check pretrained_model_name_or_path",
    )


def variant_of(path: Path) -> str | None:
    """Return the variant in a weights file's name (`model.fp16-00001-of-00002.safetensors` -> fp16), or None."""
    _, dot, rest = path.name.removesuffix(".safetensors").partition(".")
    return rest.partition("-")[0] if dot else None


def build_on_meta(cls: Any, folder: Path) -> nn.Module:
    """Return a model as its config.json has it: parameters on the meta device, buffers real."""
    from accelerate import init_empty_weights

    config = read_json(folder / "config.json")
    with init_empty_weights(include_buffers=False):
        return cls.from_config(config)
