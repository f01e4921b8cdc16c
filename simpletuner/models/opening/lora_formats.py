"""LoRAs in the layouts of other programs: ComfyUI's, and that of kohya's sd-scripts and musubi-tuner.

A preset says with what a program's names begin (`lora_formats`). After `transformer.` come diffusers' names; after
`diffusion_model.` those of the original model; after `lora_unet_` these with underscores, and each layer has its alpha.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.preset import Preset
from simpletuner.models.catalog.registry import load_preset
from simpletuner.models.family.adapter import Adapter
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.single_file.ldm_layout import unet_name
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.values.export_formats import DIFFUSERS

DIFFUSERS_NAMES, KOHYA_NAMES = "transformer.", "lora_unet_"


@dataclass(frozen=True)
class OriginalLayer:
    """A layer of the original model: its name, and the layers of diffusers whose rows it stacks, such as q, k and v."""

    name: str
    parts: tuple[str, ...]
    is_swapped: bool = False
    """Says that its rows are shift and scale, where diffusers' AdaLayerNormContinuous has scale and shift."""


def formats_of(model: Model) -> Mapping[str, str]:
    """Return with what the names of a family's LoRAs begin, by the program that reads them."""
    preset = preset_of(model)
    return preset.lora_formats if preset else {}


def preset_of(model: Model) -> Preset | None:
    return None if model.model_family in (model.model_families or {}) else load_preset(model.model_family)


def other_formats(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the programs that a file is written for beside diffusers', with what the names in it begin."""
    formats = formats_of(settings.model)
    yield from ((name, formats[name]) for name in settings.lora.export_format.split(",") if name != DIFFUSERS)


def file_of(program: str) -> str:
    """Return the name of a program's file: diffusers would take one that ends with its own name for its own."""
    return f"lora_for_{program}.safetensors"


def files_of(settings: Settings) -> list[str]:
    """Return the names of the files that export_format asks for beside diffusers'."""
    return [file_of(program) for program, _ in other_formats(settings)]


def original_layer(family: ModelFamily, layer: str) -> OriginalLayer | None:
    """Return the layer of the original model that holds a layer of diffusers; None where its name is not known."""
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


def check_formats(family: ModelFamily) -> None:
    """Raise SettingsError for a layer whose name in a file that export_format asks for is not known."""
    adapter = family.adapter
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
        tensors = named_for(prefix, family, adapter, weights)
        # What sd-scripts shows of a file, and reads where a layer has no alpha.
        metadata = {"ss_network_dim": str(adapter.rank), "ss_network_alpha": f"{adapter.alpha:g}"}
        metadata = metadata if prefix == KOHYA_NAMES else {}
        safetensors.torch.save_file(tensors, folder / file_of(program), metadata={"format": "pt", **metadata})


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
            # In the matrices: without an alpha of its own a layer's is the rank, in all programs that read these names.
            found |= {f"{prefix}{layer.name}.lora_A.weight": down, f"{prefix}{layer.name}.lora_B.weight": up * scale}
    return found


def layers_for(prefix: str, family: ModelFamily, adapter: Adapter) -> list[OriginalLayer]:
    """Return the layers that a file has, each once."""
    if prefix == DIFFUSERS_NAMES:
        return [OriginalLayer(name, (name,)) for name in adapter.modules]
    return list(dict.fromkeys(each for name in adapter.modules if (each := original_layer(family, name))))


def stacked(
    layer: OriginalLayer, family: ModelFamily, adapter: Adapter, weights: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return a layer's pair of matrices; that of a stack has a block of `up` for each part, and zeros for others."""
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
