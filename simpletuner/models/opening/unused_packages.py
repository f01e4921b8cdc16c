"""Packages that diffusers, transformers and accelerate import because they are installed, whether a run needs
them.

Together 0.5 of the 4.4 CPU s from the command to the first step of a tiny SDXL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from simpletuner.models.opening.loading import folder_at_hand
from simpletuner.private_api.of_diffusers import import_without_transformers, leave_out
from simpletuner.settings import Settings
from simpletuner.system.files.regular_files import read_file


def leave_out_unused(settings: Settings, only_counts: bool = False) -> None:
    """Keep libraries from importing what these settings have no use for, in this process from here on.

    `only_counts` says that no component of a base model is read, whose config could name torchao.
    """
    leave_out({*unused_packages(settings), *(["torchao"] if only_counts else [])})
    # accelerate's dialogues import boto3. Datasets and mirrors in buckets import it themselves.
    if "boto3" not in sys.modules:
        sys.modules["boto3"] = None
        try:
            import_module("accelerate")
        finally:
            del sys.modules["boto3"]
    import_without_transformers()


def unused_packages(settings: Settings) -> Iterator[str]:
    """Yield the optional packages that a run with these settings never imports."""
    if settings.model.model_type != "lora":
        yield "peft"
    if settings.parallel.zero_stage is None:
        yield "deepspeed"
    is_quantized = settings.training.float8 or settings.lora.base_model_precision != "no_change"
    if not is_quantized and not has_quantized_part(folder_at_hand(settings)):
        yield "torchao"


def has_quantized_part(folder: Path | None) -> bool:
    """True if a component of the base model, such as a text encoder, may be quantized by torchao."""
    try:
        return folder is None or any(b"torchao" in read_file(path) for path in folder.glob("*/config.json"))
    except OSError:  # which the check of the model names
        return True
