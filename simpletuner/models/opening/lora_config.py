"""Configs and layouts of LoRAs: diffusers' metadata, peft's adapter_config.json, ComfyUI, sd-scripts and
musubi-tuner.

A preset has the prefix of each program's names (`lora_formats`). `transformer.` is followed by diffusers'
names, `diffusion_model.` by the original model's, `lora_unet_` by these with underscores, and each layer with
its alpha.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady, SettingsError, without_errno
from simpletuner.models.catalog.registry import preset_of
from simpletuner.models.family.adapter import Adapter, peft_config
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.safetensors_dtypes import PRECISIONS
from simpletuner.models.folder.weights import PICKLE_SUFFIXES
from simpletuner.models.single_file.conversion import unet_name
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.values.parsed import DIFFUSERS
from simpletuner.system.files.regular_files import check_regular, read_file

# Diffusers' metadata key for the adapter's config, as JSON; its keys begin with the denoiser's name.
METADATA = "lora_adapter_metadata"

PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Files of an adapter's folder as peft's `save_pretrained` writes it; the weights have no metadata.
LORA_WEIGHTS = "pytorch_lora_weights.safetensors"

KINDS = {"lora_magnitude_vector": "dora", ".hada_": "loha", ".lokr_": "lokr", ".oft_R": "oft"}
"""Parts of the names in a file that tell its lora_type."""

# Supported values of peft_type; DoRA is a LORA. Others, such as ADALORA, have the same tensor names.
PEFT_TYPES = ("LORA", "LOKR", "LOHA", "OFT")

SCALING = {"r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "use_dora", "lora_bias"}
"""Keys of peft's LoraConfig that `LoraFile.scale_of` and the tensors account for."""

# Keys of peft's configs without an effect on saved matrices: how they were found and trained.
WITHOUT_EFFECT = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias"),
    *("lora_dropout", "rank_dropout", "rank_dropout_scale", "module_dropout", "init_lora_weights", "init_weights"),
    *("fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
}

# Values of peft's init_lora_weights that leave the base model as it is. PiSSA, OLoRA, CorDA, LoftQ and
# LoRA-GA subtract the first matrices from its weights, so that what they save is no difference to the
# published ones.
KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class LoraFile:
    """An adapter's tensors by the file's names, and its config: empty where a file has none."""

    path: Path
    setting: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return next((kind for part, kind in KINDS.items() if any(part in name for name in self.tensors)), "lora")

    @property
    def is_uniform(self) -> bool:
        """Says whether the config gives all layers of one rank the scale lora_alpha / rank."""
        return bool(self.config) and not (self.config.get("use_rslora") or self.config.get("alpha_pattern"))

    def error(self, problem: str, hint: str = "take another LoRA") -> SettingsError:
        return SettingsError(f"{self.setting}: {self.path} {problem}", hint)

    def scale_of(self, layer: str, rank: int) -> float:
        """Return the factor of a layer's product of matrices, as peft's `LoraLayer.update_layer` computes it.

        Raises SettingsError for an alpha that is no number, or a pattern that is no regular expression.
        """
        if not self.config:
            return 1.0
        alpha = self.config.get("lora_alpha", 8)  # peft's default
        for pattern, value in self.config.get("alpha_pattern", {}).items():
            if self.matches(pattern, layer):
                alpha = value
                break
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise self.error(f"has a lora_alpha that is no number: {str(alpha)[:40]}")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def matches(self, pattern: str, layer: str) -> bool:
        """True if a pattern's key means a layer, by peft's `get_pattern_key`."""
        try:
            # Repeated groups can take re minutes for names of 60 letters; peft writes none.
            if re.search(r"\)\s*[*+{]", pattern):
                raise self.error(f"has a key in alpha_pattern that repeats a group: {pattern[:40]}")
            return re.match(rf"(.*\.)?({pattern})$", layer) is not None
        except re.error:
            raise self.error(f"has a key in alpha_pattern that is no regular expression: {pattern[:40]}") from None

    def check_config(self, adapter: Adapter | None = None) -> None:
        """Raise SettingsError for what the config says and is not computed here.

        `adapter` is what is trained: a LoHa, LoKr or OFT must have its config; LoRAs have scales of their
        own.
        """
        if not self.config:
            return
        for key in ("alpha_pattern", "rank_pattern"):
            if not isinstance(self.config.get(key, {}), dict):
                raise self.error(f"has {key} that is no table: {self.config[key]!s:.40}")
        start = self.config.get("init_lora_weights")
        if start not in KEEPS_BASE:
            hint = "let peft convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            raise self.error(f"was made with init_lora_weights = {start!s:.40}, which changed its base model", hint)
        if self.config.get("use_dora") and self.kind != "dora":
            raise self.error("has use_dora, but no lora_magnitude_vector")
        is_lora = adapter is None or adapter.kind in ("lora", "dora")
        expected = peft_config("LORA", {}, ()) if is_lora else peft_config(*adapter.peft_arguments(), ())
        own = {"r", "oft_block_size", "alpha", "decompose_factor"}  # shapes or `check_lora_init` tell them apart
        defaults, known = expected.to_dict(), WITHOUT_EFFECT | (SCALING if is_lora else own)
        for key, value in self.config.items():
            # A key that this peft does not know is of a newer one: what is not set changes nothing.
            if key not in known and value != defaults.get(key) and (key in defaults or value):
                raise self.error(f"has {key[:40]} = {value!s:.40}, which {self.setting} does not read")


def check_is_there(path: Path, setting: str) -> None:
    """Raise SettingsError for a file that is missing, such as in the folder of something else."""
    if not os.path.lexists(path):
        folder = path.parent if path.name == LORA_WEIGHTS and path.parent.is_dir() else None
        hint = f"name a .safetensors file, or a folder with {LORA_WEIGHTS} or {PEFT_WEIGHTS}"
        raise SettingsError(f"{setting}: {f'{folder} has no LoRA' if folder else f'there is no {path}'}", hint)


def read_lora(path: Path, prefix: str, setting: str) -> LoraFile:
    """Read a file of any program whole; `prefix` is the denoiser's name in diffusers' metadata.

    Raises EnvironmentNotReady for a file that is damaged or without its config, SettingsError for a pickle
    and for values that are no finite real numbers.
    """
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise SettingsError(
            f"{setting}: {path} is a pickle: loading it can run any code, so it is refused",
            "take the .safetensors of the same LoRA, or convert it once with a tool that you trust",
        )
    check_is_there(path, setting)
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            written = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        if not isinstance(written, dict):
            raise ValueError(f"{METADATA} is no JSON object")
        config = {key.removeprefix(prefix): each for key, each in written.items() if key.startswith(prefix)}
        if not config and path.name == PEFT_WEIGHTS:
            config = json.loads(read_file(path.parent / PEFT_CONFIG))
            if not isinstance(config, dict):
                raise ValueError(f"{PEFT_CONFIG} is no JSON object")
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise EnvironmentNotReady(
            f"{setting}: cannot read {path}: {without_errno(error, path)}", "copy it again"
        ) from None
    found = LoraFile(path, setting, tensors, config)
    if (peft_type := config.get("peft_type", "LORA")) not in PEFT_TYPES:
        raise found.error(
            f"is a {peft_type!s:.40} of peft, which is not read here", "LoRA, DoRA, LoKr, LoHa and OFT are"
        )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and (tensor.is_complex() or not name.endswith("alpha")):
            raise found.error(f"has no real numbers in {name}: it is of {tensor.dtype}")
        if not torch.isfinite(tensor.float()).all():
            raise found.error(f"has NaN or infinite values in {name}")
    return found


DIFFUSERS_NAMES, KOHYA_NAMES = "transformer.", "lora_unet_"


@dataclass(frozen=True)
class OriginalLayer:
    """A layer of the original model: its name, and the layers of diffusers stacked in it (q, k and v)."""

    name: str
    parts: tuple[str, ...]
    is_swapped: bool = False
    """Says that its rows are shift and scale, where diffusers' AdaLayerNormContinuous has scale and shift."""


def formats_of(model: Model) -> Mapping[str, str]:
    """Return with what the names of a family's LoRAs begin, by the program that reads them."""
    preset = preset_of(model)
    return preset.lora_formats if preset else {}


def other_formats(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the programs that a file is written for beside diffusers', with what the names in it begin."""
    formats = formats_of(settings.model)
    yield from ((name, formats[name]) for name in settings.lora.export_format.split(",") if name != DIFFUSERS)


def file_of(program: str) -> str:
    # diffusers would take one that ends with its own name for its own.
    return f"lora_for_{program}.safetensors"


def files_of(settings: Settings) -> list[str]:
    """Return the names of the files that export_format asks for beside diffusers'."""
    return [file_of(program) for program, _ in other_formats(settings)]


def original_layer(family: ModelFamily, layer: str) -> OriginalLayer | None:
    """Layer of the original model that holds a layer of diffusers; None where its name is not known."""
    preset = preset_of(family.settings.model)
    number = re.search(r"\.(\d+)\.", layer)
    if preset is None:
        return None
    if number is None:  # outside of the blocks, originals have names and orders of their own
        return next(
            (OriginalLayer(name, (layer,)) for name, parts in preset.lora_names.items() if layer in parts), None
        )
    if family.settings.model.model_family == "sdxl":
        # sd-scripts has the original's U-Net for SDXL, and diffusers' for Stable Diffusion 1 and 2.
        return OriginalLayer(unet_name(layer, family.exported_config()), (layer,))
    if not preset.lora_names:
        return OriginalLayer(layer, (layer,))
    general = f"{layer[: number.start()]}.{{}}.{layer[number.end() :]}"
    for name, parts in preset.lora_names.items():
        if general in parts:
            kind = type(family.meta_denoiser.get_submodule(layer.rpartition(".")[0])).__name__
            own = tuple(part.format(number[1]) for part in parts)
            return OriginalLayer(name.format(number[1]), own, kind == "AdaLayerNormContinuous")
    return None


def with_scale_and_shift_swapped(up: Tensor) -> Tensor:
    """Return `up` with the halves of its rows exchanged."""
    return torch.cat(up.chunk(2)[::-1])


def check_formats(family: ModelFamily, adapter: Adapter | None) -> None:
    """Raise SettingsError for a layer whose name in a file that export_format asks for is not known."""
    for program, prefix in other_formats(family.settings) if adapter else ():
        unknown = [each for each in adapter.modules if prefix != DIFFUSERS_NAMES and not original_layer(family, each)]
        if unknown:
            raise SettingsError(
                f"export_format={program}: {unknown[0]} has no name there that is known",
                f"leave {unknown[0]} out of lora_target_modules, or {program} out of export_format",
            )


def write_formats(folder: Path, family: ModelFamily, adapter: Adapter, weights: Mapping[str, Tensor]) -> None:
    """Write a LoRA for each other program that export_format names."""
    for program, prefix in other_formats(family.settings):
        tensors = in_export_precision(named_for(prefix, family, adapter, weights), family)
        # What sd-scripts shows of a file, and reads where a layer has no alpha.
        metadata = {"ss_network_dim": str(adapter.rank), "ss_network_alpha": f"{adapter.alpha:g}"}
        metadata = metadata if prefix == KOHYA_NAMES else {}
        safetensors.torch.save_file(tensors, folder / file_of(program), metadata={"format": "pt", **metadata})


def in_export_precision(tensors: Mapping[str, Tensor], family: ModelFamily) -> dict[str, Tensor]:
    """Return an adapter's tensors as they are written; alphas stay, of which rounding would scale a layer."""
    dtype = PRECISIONS[family.settings.checkpoints.export_precision or "fp32"]
    return {name: each.to(dtype) if each.ndim else each for name, each in tensors.items()}


def named_for(prefix: str, family: ModelFamily, adapter: Adapter, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a LoRA's tensors as a program reads them whose names begin with `prefix`."""
    found: dict[str, Tensor] = {}
    scale = adapter.alpha / adapter.rank
    for layer in layers_for(prefix, family, adapter):
        down, up = stacked(layer, family, adapter, weights)
        if prefix == KOHYA_NAMES:
            name, alpha = prefix + layer.name.replace(".", "_"), torch.tensor(scale * down.shape[0])
            found |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}
        else:
            # In the matrices: without its own alpha a layer's is the rank, for all readers of these names.
            found |= {f"{prefix}{layer.name}.lora_A.weight": down, f"{prefix}{layer.name}.lora_B.weight": up * scale}
    return found


def layers_for(prefix: str, family: ModelFamily, adapter: Adapter) -> list[OriginalLayer]:
    if prefix == DIFFUSERS_NAMES:
        return [OriginalLayer(name, (name,)) for name in adapter.modules]
    return list(dict.fromkeys(each for name in adapter.modules if (each := original_layer(family, name))))


def stacked(
    layer: OriginalLayer, family: ModelFamily, adapter: Adapter, weights: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Pair of matrices of a layer; for a stack, `up` has a block for each part, and zeros for others."""
    pairs = []
    for part in layer.parts:
        rows, columns = family.meta_denoiser.get_parameter(f"{part}.weight").shape[:2]
        if part in adapter.modules:
            pair = (weights[f"{part}.lora_A.weight"], weights[f"{part}.lora_B.weight"])
        else:
            pair = (torch.zeros(adapter.rank, columns), torch.zeros(rows, adapter.rank))
        pairs.append(tuple(each.detach().to("cpu").contiguous() for each in pair))
    if len(pairs) == 1:
        down, up = pairs[0]
        return down, with_scale_and_shift_swapped(up) if layer.is_swapped else up
    # Exact: diffusers, sd-scripts and musubi-tuner know such a block diagonal, and take it apart again.
    return torch.cat([down for down, _ in pairs]), torch.block_diag(*(up for _, up in pairs))
