"""LoRAs of any program, layer by layer: their names for the layers of a denoiser, and their scales."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from simpletuner.models.family.adapter import layers_ending_with
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.lora_config import LoraFile
from simpletuner.models.opening.lora_formats import OriginalLayer, original_layer, with_scale_and_shift_swapped

NAME = re.compile(
    r"(?:base_model\.model\.)?(?:transformer\.|unet\.|diffusion_model\.|lora_unet_|lora_transformer_)?(?P<layer>.+?)\."
    r"(?P<part>lora_A|lora_down|lora_B|lora_up|lora_magnitude_vector|alpha)(?:\.default)?(?P<end>\.weight|\.bias)?"
)
"""Names of diffusers, peft, kohya's programs, ComfyUI, ai-toolkit and OneTrainer."""

PARTS = {
    **{(name, end): "down" for name in ("lora_A", "lora_down") for end in (".weight", None)},
    **{(name, end): "up" for name in ("lora_B", "lora_up") for end in (".weight", None)},
    **{(name, ".bias"): "bias" for name in ("lora_B", "lora_up")},
    **{("lora_magnitude_vector", end): "length" for end in (".weight", None)},
    ("alpha", None): "alpha",
}
"""Tensors of a layer by the end of their names."""

NAMES = {"down": "lora_A.weight", "up": "lora_B.weight", "bias": "lora_B.bias", "length": "lora_magnitude_vector"}
"""Their names in checkpoints, which are peft's."""


@dataclass
class LoraLayer:
    """The tensors of one layer in a file, and the layer's name there."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def scaled(self, file: LoraFile, unit: float) -> dict[str, Tensor]:
        """Return them in float32, with the scale in units of `unit` in `up` and `bias`.

        Raises SettingsError for matrices that are none or do not fit each other, and for an alpha that is no number.
        """
        tensors = {part: each.float() for part, each in self.tensors.items() if part != "alpha"}
        down, up, alpha = tensors["down"], tensors["up"], self.tensors.get("alpha")
        if down.ndim < 2 or up.ndim < 2 or down.shape[0] != up.shape[1] or not down.numel() or not up.numel():
            raise file.error(f"has matrices of {tuple(down.shape)} and {tuple(up.shape)} for {self.name}")
        if alpha is not None and alpha.numel() != 1:
            raise file.error(f"has an alpha of {alpha.numel()} values for {self.name}")
        rank = down.shape[0]
        scale = file.scale_of(self.name, rank) if alpha is None else alpha.item() / rank
        for part in ("up", "bias"):
            if part in tensors:
                # One factor: what this program wrote is read bit for bit, since its scale is the unit.
                tensors[part] = tensors[part] * (scale / unit)
                if not torch.isfinite(tensors[part]).all():
                    raise file.error(f"has an alpha that is too large for {self.name}")
        return tensors


def read_layers(file: LoraFile, family: ModelFamily, unit: float = 1) -> dict[str, Tensor]:
    """Return a LoRA's or DoRA's tensors by our names, with each layer's scale, in units of `unit`, in lora_B.

    Raises SettingsError for a file that adapts what is no layer of the denoiser, or whose alpha is 0 in all layers.
    """
    layers = layers_of(file)
    used: set[str] = set()
    found: dict[str, Tensor] = {}
    for layer in layers_ending_with(family.meta_denoiser, ""):
        original = original_layer(family, layer) or OriginalLayer(layer, (layer,))
        name = next((each for each in (flat(layer), flat(original.name)) if each in layers), None)
        if name is None:
            continue
        used.add(name)
        tensors = layers[name].scaled(file, unit)
        if name != flat(layer):
            tensors = as_in_diffusers(tensors, original, layer, family, file)
        if tensors["down"].any() or tensors["up"].any() or len(original.parts) == 1:
            # Zeros stand for a layer that is not adapted in a stack with others that are.
            found |= {f"{layer}.{NAMES[part]}": each for part, each in tensors.items()}
    if unknown := sorted(layers.keys() - used):
        model, name = type(family.meta_denoiser).__name__, layers[unknown[0]].name
        raise file.error(
            f"adapts {name}, which is no layer of {model}", "take a LoRA of the same model, without text encoders"
        )
    ups = [each for name, each in found.items() if name.endswith(NAMES["up"])]
    if any(each.tensors["up"].any() for each in layers.values()) and not any(up.any() for up in ups):
        raise file.error("changes nothing: its alpha is 0 in all layers", "take another LoRA, or correct its alpha")
    return found


def layers_of(file: LoraFile) -> dict[str, LoraLayer]:
    """Sort a file's tensors by layer, whose names have underscores for dots as in kohya's files."""
    from diffusers.utils import convert_unet_state_dict_to_peft

    layers: dict[str, LoraLayer] = {}
    # Diffusers' script for SDXL writes `.lora.down` for `.lora_A`.
    for name, tensor in convert_unet_state_dict_to_peft(dict(file.tensors)).items():
        match = NAME.fullmatch(name)
        part = PARTS.get((match["part"], match["end"])) if match else None
        if match is None or part is None:
            kind = file.config.get("peft_type", "LORA")
            if kind != "LORA":
                raise file.error(f"is of peft_type {kind!s:.40}, which is no LoRA")
            hint = "open it by the pipeline's load_lora_weights, and write it by save_lora_weights"
            raise file.error(f"is no LoRA that is known here: it has {name}", hint)
        layers.setdefault(flat(match["layer"]), LoraLayer(match["layer"])).tensors[part] = tensor
    if broken := [each.name for each in layers.values() if not {"down", "up"} <= each.tensors.keys()]:
        raise file.error(f"has one matrix of two for {broken[0]}", "copy it again")
    return layers


def flat(name: str) -> str:
    return name.replace(".", "_")


def as_in_diffusers(
    tensors: dict[str, Tensor], original: OriginalLayer, layer: str, family: ModelFamily, file: LoraFile
) -> dict[str, Tensor]:
    """Return a layer's part of an original layer's tensors, in diffusers' order."""
    if len(original.parts) == 1 and not original.is_swapped:
        return tensors
    if tensors.keys() != {"down", "up"}:
        raise file.error(f"has more than two matrices for {original.name}, whose rows diffusers orders otherwise")
    down, up = tensors["down"], tensors["up"]
    if original.is_swapped:
        return {"down": down, "up": with_scale_and_shift_swapped(up)}
    down, up = unstacked(down, up, original, layer, family)
    return {"down": down, "up": up}


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
