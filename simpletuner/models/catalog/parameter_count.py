"""Count a denoiser's parameters from the headers of its weights, or take the published number; no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from simpletuner.models.catalog.registry import flavour_of, tiny_architecture
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.regular_files import open_regular

DENOISERS = ("transformer", "unet")
LONGEST_HEADER = 100_000_000
"""Bytes; the longest that safetensors itself reads."""


def parameters_of(model: Model) -> tuple[int, str] | None:
    """The number of parameters and where it is from; None if it cannot be known without loading the denoiser."""
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
    """Return the bytes of weights that an exported pipeline copies from a base model: all but the denoiser's."""
    files = [path for path in base.glob("*/*.safetensors") if path.parent.name not in DENOISERS and path.is_file()]
    return sum(path.stat().st_size for path in files)


def weights_of_variant(files: Iterable[Path], variant: str | None) -> list[Path]:
    """Files of one variant; without a variant, those that have no dot in their stem."""
    # Such as model.fp16.safetensors, and model.fp16-00001-of-00002.safetensors of several.
    marked = f".{variant}" if variant else ""
    return [path for path in files if (marked in path.stem if marked else "." not in path.stem)]


def parameters_in(path: Path) -> int:
    """Count the numbers of a safetensors file by its header, which lists every shape; 0 for a damaged file."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0
