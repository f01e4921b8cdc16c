"""A LoRA as diffusers' `load_lora_weights` reads it: one safetensors file, with rank and alpha in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady, SettingsError, without_errno
from simpletuner.models.catalog.registry import TINY, flavour_of
from simpletuner.models.family.adapter import Adapter, end_of
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.foreign_lora import read_foreign
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.regular_files import check_regular

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
"""Diffusers' metadata key for the adapter's config, as JSON; its keys begin with the denoiser's name."""


def lora_file(path: Path) -> Path:
    """Return the LoRA's file, given its path or that of its folder."""
    return path / LORA_WEIGHTS if path.is_dir() else path


def write_lora(path: Path, family: ModelFamily, adapter: Adapter, weights: Mapping[str, Tensor]) -> None:
    """Write an adapter, with its config and the name of its base model as metadata."""
    # Only the fields that are needed to apply it: peft refuses those that its version does not know.
    config = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": list(adapter.modules)}
    own = {f"{family.lora_prefix}.{name}": value for name, value in config.items()}
    tensors = {
        f"{family.lora_prefix}.{name}": tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()
    }
    # Not peft's base_model_name_or_path: peft looks that name up on the hub whenever it saves weights.
    base = base_name(family.settings.model, family.folder)
    metadata = {"format": "pt", METADATA: json.dumps(own, sort_keys=True), "base_model": base}
    safetensors.torch.save_file(tensors, path, metadata=metadata)


def base_name(model: Model, folder: Path) -> str:
    """Return the base model's folder or hub id in the settings, else the flavour's hub id, else the folder's name."""
    flavour = flavour_of(model) if model.model_flavour != TINY else None
    return model.pretrained_model_name_or_path or (flavour.hub if flavour else folder.name)


def check_lora_init(family: ModelFamily) -> None:
    """Check that the file lora_init has the layers, shapes, rank and alpha of the adapter that is trained.

    Raises SettingsError with the setting that would fit, EnvironmentNotReady for a file that cannot be read.
    """
    path, adapter = family.settings.lora.lora_init, family.adapter
    if path is None or adapter is None:
        return
    path, prefix = lora_file(path), f"{family.lora_prefix}."
    shapes, config = read_header(path)
    if not is_ours(config, prefix):
        shapes = {f"{prefix}{name}": tuple(each.shape) for name, each in read_foreign(path, family).items()}
    wanted = {f"{prefix}{name}": shape for name, shape in family.trained_shapes().items()}
    ranks = {shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight")}
    if shapes.keys() != wanted.keys():
        ends = sorted({end_of(name.rpartition(".lora_")[0]) for name in shapes})
        odd = min(shapes.keys() ^ wanted.keys())
        where = "it" if odd in shapes else "this run"
        raise SettingsError(
            f"lora_init: {path} adapts other layers than this run: {odd} is only in {where}",
            f"set lora_target_modules={','.join(ends)}",
        )
    if ranks != {adapter.rank}:
        found = " and ".join(map(str, sorted(ranks)))
        hint = f"set lora_rank={found}" if len(ranks) == 1 else "layers of one LoRA have one rank here: take another"
        raise SettingsError(f"lora_init: {path} is of rank {found}, but lora_rank = {adapter.rank}", hint)
    if odd := next((name for name in wanted if shapes[name] != wanted[name]), None):
        raise SettingsError(
            f"lora_init: {path} is of another model: {odd} is {shapes[odd]} in it, {wanted[odd]} here",
            "take a LoRA of the same base model",
        )
    alpha = config.get(f"{prefix}lora_alpha", adapter.alpha)
    if alpha != adapter.alpha:
        raise SettingsError(
            f"lora_init: {path} has alpha {alpha:g}, but lora_alpha = {adapter.alpha:g}", f"set lora_alpha={alpha:g}"
        )


def is_ours(config: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a file's config says its alpha; without one its names may be those of any program."""
    return f"{prefix}lora_alpha" in config


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of a LoRA's tensors by their names, and its config.

    Raises EnvironmentNotReady for a damaged file.
    """
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            config = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise EnvironmentNotReady(f"lora_init: cannot read {path}: {without_errno(error)}", "copy it again") from None
    return shapes, config if isinstance(config, dict) else {}


def load_lora(path: Path, family: ModelFamily, tensors: Mapping[str, Tensor]) -> None:
    """Copy a LoRA into an adapter's tensors, so that it computes what it did, whatever its scale and its program."""
    adapter, prefix = family.adapter, f"{family.lora_prefix}."
    assert adapter is not None
    if is_ours(read_header(path)[1], prefix):
        stored = {name.removeprefix(prefix): each for name, each in safetensors.torch.load_file(path).items()}
    else:
        stored, scale = read_foreign(path, family), adapter.alpha / adapter.rank
        stored = {name: each / scale if name.endswith(".lora_B.weight") else each for name, each in stored.items()}
    for name, tensor in tensors.items():
        tensor.copy_(stored[name])
