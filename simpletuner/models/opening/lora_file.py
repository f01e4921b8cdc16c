"""A LoRA as diffusers' `load_lora_weights` reads it: one safetensors file, with rank and alpha in its metadata.

Diffusers reads DoRA alike, and LoKr by the denoiser's `load_lora_adapter`. LoHa and OFT are folders of peft's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady, SettingsError, without_errno
from simpletuner.models.catalog.registry import TINY, flavour_of
from simpletuner.models.family.adapter import Adapter, end_of
from simpletuner.models.family.adapter_types import layer_of
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.foreign_lora import read_foreign
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.regular_files import check_regular

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
"""Diffusers' metadata key for the adapter's config, as JSON; its keys begin with the denoiser's name."""


PEFT_WEIGHTS, PEFT_CONFIG, PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
"""Files of an adapter that diffusers does not load, as peft's `PeftModel.from_pretrained` opens them."""

OF_PEFT = ("loha", "oft")
"""Kinds of adapters that are written so."""

KINDS = {"lora_magnitude_vector": "dora", ".hada_": "loha", ".lokr_": "lokr", ".oft_R": "oft"}
"""Parts of the names in a file that tell its lora_type."""


def lora_file(path: Path) -> Path:
    """Return the LoRA's file, given its path or that of its folder."""
    if not path.is_dir():
        return path
    return path / (PEFT_WEIGHTS if (path / PEFT_WEIGHTS).exists() else LORA_WEIGHTS)


def write_lora(folder: Path, family: ModelFamily, adapter: Adapter, weights: Mapping[str, Tensor]) -> None:
    """Write an adapter, with its config and the name of its base model as metadata."""
    kind, arguments = adapter.peft_arguments()
    # Only the fields that are needed to apply it: peft refuses those that its version does not know.
    config = {name: value for name, value in arguments.items() if name != "lora_dropout"}
    config["target_modules"] = list(adapter.modules)
    own = {f"{family.lora_prefix}.{name}": value for name, value in config.items()}
    by_peft = adapter.kind in OF_PEFT
    prefix = PEFT_PREFIX if by_peft else f"{family.lora_prefix}."
    tensors = {f"{prefix}{name}": tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
    # Not peft's base_model_name_or_path: peft looks that name up on the hub whenever it saves weights.
    base = base_name(family.settings.model, family.folder)
    metadata = {"format": "pt", METADATA: json.dumps(own, sort_keys=True), "base_model": base}
    safetensors.torch.save_file(tensors, folder / (PEFT_WEIGHTS if by_peft else LORA_WEIGHTS), metadata=metadata)
    if by_peft:
        write_json(folder / PEFT_CONFIG, {"peft_type": kind, **config})


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
    path = lora_file(path)
    shapes, config = read_header(path, family)
    wanted = family.trained_shapes()
    if not config:
        check_kind("lora", adapter, path)
        shapes = {name: tuple(each.shape) for name, each in read_foreign(path, family).items()}
    check_kind(kind_of(shapes), adapter, path)
    ranks = {shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight")} or {config.get("r")}
    if shapes.keys() != wanted.keys():
        ends = sorted({end_of(layer_of(name)) for name in shapes})
        odd = min(shapes.keys() ^ wanted.keys())
        where = "it" if odd in shapes else "this run"
        raise SettingsError(
            f"lora_init: {path} adapts other layers than this run: {odd} is only in {where}",
            f"set lora_target_modules={','.join(ends)}",
        )
    if adapter.kind != "oft" and ranks != {adapter.rank}:
        found = " and ".join(map(str, sorted(ranks)))
        hint = f"set lora_rank={found}" if len(ranks) == 1 else "layers of one LoRA have one rank here: take another"
        raise SettingsError(f"lora_init: {path} is of rank {found}, but lora_rank = {adapter.rank}", hint)
    if odd := next((name for name in wanted if shapes[name] != wanted[name]), None):
        raise SettingsError(
            f"lora_init: {path} is of another model: {odd} is {shapes[odd]} in it, {wanted[odd]} here",
            "take a LoRA of the same base model",
        )
    alpha = config.get("lora_alpha", config.get("alpha", adapter.alpha))
    if alpha != adapter.alpha:
        raise SettingsError(
            f"lora_init: {path} has alpha {alpha:g}, but lora_alpha = {adapter.alpha:g}", f"set lora_alpha={alpha:g}"
        )


def kind_of(names: Iterable[str]) -> str:
    """Return the lora_type of a file with these names."""
    return next((kind for part, kind in KINDS.items() if any(part in name for name in names)), "lora")


def check_kind(kind: str, adapter: Adapter, path: Path) -> None:
    """Raise SettingsError for a file of another lora_type."""
    if kind != adapter.kind:
        raise SettingsError(
            f"lora_init: {path} is of lora_type {kind}, but lora_type = {adapter.kind}", f"set lora_type={kind}"
        )


def read_header(
    path: Path, family: ModelFamily, setting: str = "lora_init"
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of an adapter's tensors by our names, and its config.

    The config is empty for a file without one, whose names may be those of any program. Raises EnvironmentNotReady for
    a damaged file.
    """
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            config = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise EnvironmentNotReady(f"{setting}: cannot read {path}: {without_errno(error)}", "copy it again") from None
    prefix = f"{family.lora_prefix}."
    known = config if isinstance(config, dict) and f"{prefix}r" in config else {}
    own = {name.removeprefix(prefix): value for name, value in known.items()}
    return {without_prefix(name, family): shape for name, shape in shapes.items()}, own


def without_prefix(name: str, family: ModelFamily) -> str:
    return name.removeprefix(PEFT_PREFIX).removeprefix(f"{family.lora_prefix}.")


def load_lora(path: Path, family: ModelFamily, tensors: Mapping[str, Tensor]) -> None:
    """Copy a LoRA into an adapter's tensors, so that it computes what it did, whatever its scale and its program."""
    adapter = family.adapter
    assert adapter is not None
    if read_header(path, family)[1]:
        stored = {without_prefix(name, family): each for name, each in safetensors.torch.load_file(path).items()}
    else:
        stored, scale = read_foreign(path, family), adapter.alpha / adapter.rank
        stored = {name: each / scale if name.endswith(".lora_B.weight") else each for name, each in stored.items()}
    for name, tensor in tensors.items():
        tensor.copy_(stored[name])
