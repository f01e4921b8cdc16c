"""A LoRA as diffusers' `load_lora_weights` reads it: one safetensors file, with rank and alpha in its metadata.

Diffusers reads DoRA alike, and LoKr by the denoiser's `load_lora_adapter`. LoHa and OFT are folders of peft's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from simpletuner.models.catalog.registry import TINY, flavour_of
from simpletuner.models.family.adapter import Adapter, end_of
from simpletuner.models.family.adapter_types import layer_of
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.lora_config import METADATA, PEFT_CONFIG, PEFT_WEIGHTS, LoraFile, read_lora
from simpletuner.models.opening.lora_layers import read_layers
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.atomic import write_json

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT_PREFIX = "base_model.model."

OF_PEFT = ("loha", "oft")
"""Kinds of adapters that diffusers does not load, written as peft's `PeftModel.from_pretrained` opens them."""


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


def check_lora_init(family: ModelFamily) -> str | None:
    """Check that the adapter that is trained can begin as the file lora_init; return what begins as new, in words.

    Raises SettingsError with the setting that would fit, EnvironmentNotReady for a file that cannot be read.
    """
    path, adapter = family.settings.lora.lora_init, family.adapter
    if path is None or adapter is None:
        return None
    file = read_lora(lora_file(path), f"{family.lora_prefix}.", "lora_init")
    if file.kind != adapter.kind:
        raise file.error(f"is of lora_type {file.kind}, but lora_type = {adapter.kind}", f"set lora_type={file.kind}")
    file.check_config(adapter)
    shapes, wanted = {name: each.shape for name, each in tensors_of(file, family).items()}, family.trained_shapes()
    layers, own = ({layer_of(name) for name in each} for each in (shapes, wanted))
    # As a layer's missing ranks do, a LoRA's missing layers begin as new ones, which change nothing yet.
    odd = shapes.keys() - wanted.keys() if adapter.kind == "lora" else shapes.keys() ^ wanted.keys()
    if any(name.endswith(".bias") for name in odd):
        raise file.error("has lora_bias, which is not trained here")
    if odd:
        ends, name = sorted({end_of(name) for name in layers}), min(odd)
        problem = f"adapts other layers than this run: {name} is only in {'it' if name in shapes else 'this run'}"
        raise file.error(problem, f"set lora_target_modules={','.join(ends)}")
    check_ranks(file, adapter, shapes)
    if other := next(
        (name for name, shape in shapes.items() if without_rank(name, shape) != without_rank(name, wanted[name])), None
    ):
        problem = f"is of another model: {other} is {tuple(shapes[other])} in it, {wanted[other]} here"
        raise file.error(problem, "take a LoRA of the same base model")
    return (
        f"lora_init adapts {len(layers)} of {len(own)} layers: the others begin as new ones" if own - layers else None
    )


def without_rank(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one of LoRA's matrices without its rank, which `load_lora` fills up; others' as they are."""
    if name.endswith(".lora_A.weight"):
        return shape[1:]
    return (shape[0], *shape[2:]) if name.endswith(".lora_B.weight") else tuple(shape)


def check_ranks(file: LoraFile, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise SettingsError for another rank than the largest of a file's layers, or another alpha."""
    own = [shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight")]
    ranks = sorted(set(own)) or [file.config.get("r")]
    if adapter.kind != "oft" and ranks[-1] != adapter.rank:
        found = " to ".join(str(each) for each in dict.fromkeys((ranks[0], ranks[-1])))
        raise file.error(f"is of rank {found}, but lora_rank = {adapter.rank}", f"set lora_rank={ranks[-1]}")
    alpha = file.config.get("lora_alpha", file.config.get("alpha", adapter.alpha))
    if file.is_uniform and len(ranks) == 1 and alpha != adapter.alpha:
        shown = f"{alpha:g}" if isinstance(alpha, (int, float)) else str(alpha)[:40]
        raise file.error(f"has alpha {shown}, but lora_alpha = {adapter.alpha:g}", f"set lora_alpha={shown}")


def tensors_of(file: LoraFile, family: ModelFamily) -> dict[str, Tensor]:
    """Return a file's tensors by our names; those of a LoRA or DoRA at the scale that the run gives them."""
    adapter = family.adapter
    assert adapter is not None
    if file.kind in ("lora", "dora"):
        return read_layers(file, family, adapter.alpha / adapter.rank)
    prefixes = (PEFT_PREFIX, f"{family.lora_prefix}.")
    return {name.removeprefix(prefixes[0]).removeprefix(prefixes[1]): each for name, each in file.tensors.items()}


def load_lora(path: Path, family: ModelFamily, tensors: Mapping[str, Tensor]) -> None:
    """Copy a LoRA into a new adapter's tensors, so that it computes what it did, whatever its scale and its program."""
    stored = tensors_of(read_lora(path, f"{family.lora_prefix}.", "lora_init"), family)
    for name, value in stored.items():
        # A layer of a lower rank leaves the rest as it is in a new LoRA: random in lora_A, zero in lora_B.
        tensors[name][tuple(map(slice, value.shape))].copy_(value)
