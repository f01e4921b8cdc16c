"""LoRAs that other programs wrote: their names for the layers of a denoiser, and their scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.family.adapter import layers_ending_with
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.lora_formats import OriginalLayer, original_layer

NAME = re.compile(
    r"(?:base_model\.model\.)?(?:transformer\.|unet\.|diffusion_model\.|lora_unet_|lora_transformer_)?"
    r"(?P<layer>.+?)(?:\.(?P<down>lora_(?:A|down))|\.(?P<up>lora_(?:B|up))|\.alpha)(?:\.default)?(?:\.weight)?"
)
"""Names of diffusers, peft, kohya's programs, ComfyUI, ai-toolkit and OneTrainer."""


@dataclass
class LoraPair:
    """The matrices of one layer in a file, and its alpha: the rank where there is none."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Return both, with the scale in the second."""
        down, up = self.tensors["down"].float(), self.tensors["up"].float()
        alpha = self.tensors.get("alpha")
        return down, up if alpha is None else up * (alpha.item() / down.shape[0])


def read_foreign(path: Path, family: ModelFamily, setting: str = "lora_init") -> dict[str, Tensor]:
    """Return a LoRA's matrices by our names, with each layer's scale in lora_B.

    Raises SettingsError for a file that adapts what is no layer of the denoiser.
    """
    pairs = pairs_of(safetensors.torch.load_file(path), path, setting)
    used: set[str] = set()
    found: dict[str, Tensor] = {}
    for layer in layers_ending_with(family.meta_denoiser, ""):
        original = original_layer(family, layer) or OriginalLayer(layer, (layer,))
        name = next((each for each in (flat(layer), flat(original.name)) if each in pairs), None)
        if name is None:
            continue
        used.add(name)
        down, up = pairs[name].scaled()
        if name != flat(layer) and len(original.parts) > 1:
            down, up = unstacked(down, up, original, layer, family)
        if down.any() or up.any():  # zeros stand for a layer that is not adapted in a stack with others that are
            found |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    if unknown := sorted(pairs.keys() - used):
        raise SettingsError(
            f"{setting}: {path} adapts {unknown[0]}, which is no layer of {type(family.meta_denoiser).__name__}",
            "take a LoRA of the same model, without text encoders",
        )
    return found


def pairs_of(tensors: Mapping[str, Tensor], path: Path, setting: str) -> dict[str, LoraPair]:
    """Sort a file's tensors by layer, whose names have underscores for dots as in kohya's files."""
    from diffusers.utils import convert_unet_state_dict_to_peft

    pairs: dict[str, LoraPair] = {}
    # Diffusers' script for SDXL writes `.lora.down` for `.lora_A`.
    for name, tensor in convert_unet_state_dict_to_peft(dict(tensors)).items():
        if (match := NAME.fullmatch(name)) is None:
            raise SettingsError(
                f"{setting}: {path} is no LoRA that is known here: it has {name}",
                "open it by the pipeline's load_lora_weights, and write it by save_lora_weights",
            )
        kind = "down" if match["down"] else "up" if match["up"] else "alpha"
        pairs.setdefault(flat(match["layer"]), LoraPair()).tensors[kind] = tensor
    if broken := [name for name, pair in pairs.items() if not {"down", "up"} <= pair.tensors.keys()]:
        raise SettingsError(f"{setting}: {path} has one matrix of two for {broken[0]}", "copy it again")
    return pairs


def flat(name: str) -> str:
    return name.replace(".", "_")


def unstacked(
    down: Tensor, up: Tensor, original: OriginalLayer, layer: str, family: ModelFamily
) -> tuple[Tensor, Tensor]:
    """Return one part's matrices of a stack's: its own block, or all of `down` where the parts share it."""
    shapes = [family.meta_denoiser.get_parameter(f"{part}.weight").shape for part in original.parts]
    index, rows = original.parts.index(layer), [shape[0] for shape in shapes]
    count, rank = len(rows), down.shape[0]
    if sum(rows) != up.shape[0]:
        return down, up  # of another model, which the comparison of shapes finds
    parts = up.split(rows)
    if rank % count == 0:
        blocks = [part.chunk(count, dim=1) for part in parts]
        if not any(torch.any(blocks[i][j]) for i in range(count) for j in range(count) if i != j):
            return down.chunk(count)[index].contiguous(), blocks[index][index].contiguous()
    return down, parts[index].contiguous()
