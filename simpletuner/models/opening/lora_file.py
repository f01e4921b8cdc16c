"""Read and write LoRA files.

Ours are read by diffusers' `load_lora_weights`: one safetensors file, with rank and alpha in its metadata.
DoRA is read alike, LoKr by the denoiser's `load_lora_adapter`; LoHa and OFT are peft's folders. LoRAs of
other programs are mapped layer by layer: names of the denoiser's layers, and scales.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import safetensors.torch
import torch
from torch import Tensor

from simpletuner.models.catalog.registry import TINY, flavour_of
from simpletuner.models.family.adapter import Adapter, end_of, layer_of, layers_ending_with
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.lora_config import (
    LORA_WEIGHTS,
    METADATA,
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    LoraFile,
    OriginalLayer,
    in_export_precision,
    original_layer,
    read_lora,
    with_scale_and_shift_swapped,
)
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.atomic import write_json

DENOISERS = r"(?:base_model\.model\.)?(?:transformer\.|unet\.|diffusion_model\.|lora_unet_|lora_transformer_|lycoris_)?"
"""Prefixes of the names of a denoiser's layers, by program."""

NAME = re.compile(
    rf"{DENOISERS}(?P<layer>.+?)\."
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
"""Names in checkpoints, as in peft."""


@dataclass
class LoraLayer:
    """The tensors of one layer in a file, and the layer's name there."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def scaled(self, file: LoraFile, unit: float) -> dict[str, Tensor]:
        """Return them in float32, with the scale in units of `unit` in `up` and `bias`.

        Raises SettingsError for matrices that are none or do not fit each other, and for an alpha that is no
        number.
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

    Raises SettingsError for a file that adapts no layer of the denoiser, or has an alpha of 0 in all.
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


PEFT_PREFIX = "base_model.model."

# Adapters that diffusers does not load, written for peft's `PeftModel.from_pretrained`.
OF_PEFT = ("loha", "oft")


def lora_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    return path / (PEFT_WEIGHTS if (path / PEFT_WEIGHTS).exists() else LORA_WEIGHTS)


def write_lora(
    folder: Path,
    family: ModelFamily,
    adapter: Adapter,
    weights: Mapping[str, Tensor],
    origin: Mapping[str, str] = MappingProxyType({}),
) -> None:
    kind, arguments = adapter.peft_arguments()
    # Only the fields that are needed to apply it: peft refuses those that its version does not know.
    config = {name: value for name, value in arguments.items() if name != "lora_dropout"}
    config["target_modules"] = list(adapter.modules)
    config |= rank_patterns(adapter, weights)
    own = {f"{family.lora_prefix}.{name}": value for name, value in config.items()}
    by_peft = adapter.kind in OF_PEFT
    prefix = PEFT_PREFIX if by_peft else f"{family.lora_prefix}."
    tensors = {f"{prefix}{name}": tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
    tensors = in_export_precision(tensors, family)
    # Not peft's base_model_name_or_path: peft looks that name up on the hub whenever it saves weights.
    base = base_name(family.settings.model, family.folder)
    metadata = {"format": "pt", METADATA: json.dumps(own, sort_keys=True), "base_model": base, **origin}
    safetensors.torch.save_file(tensors, folder / (PEFT_WEIGHTS if by_peft else LORA_WEIGHTS), metadata=metadata)
    if by_peft:
        write_json(folder / PEFT_CONFIG, {"peft_type": kind, **config})


def rank_patterns(adapter: Adapter, weights: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Return peft's patterns for the layers of another rank than the adapter's, each at the scale 1."""
    ranks = {layer_of(name): len(each) for name, each in weights.items() if name.endswith(NAMES["down"])}
    other = {re.escape(layer): rank for layer, rank in ranks.items() if rank != adapter.rank}
    return {"rank_pattern": other, "alpha_pattern": other} if other else {}


def base_name(model: Model, folder: Path) -> str:
    """Base model's folder or hub id in the settings, else the flavour's hub id, else the folder's name."""
    flavour = flavour_of(model) if model.model_flavour != TINY else None
    return model.pretrained_model_name_or_path or (flavour.hub if flavour else folder.name)


def check_lora_init(family: ModelFamily) -> str | None:
    """Check that the trained adapter can begin as the file lora_init; return the parts that begin as new, in
    words.

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
    """Shape of one of LoRA's matrices without its rank, which `load_lora` fills up; others' as they are."""
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
    """Tensors of a file by our names; a LoRA's or DoRA's are at the run's scale."""
    adapter = family.adapter
    assert adapter is not None
    if file.kind in ("lora", "dora"):
        return read_layers(file, family, adapter.alpha / adapter.rank)
    prefixes = (PEFT_PREFIX, f"{family.lora_prefix}.")
    return {name.removeprefix(prefixes[0]).removeprefix(prefixes[1]): each for name, each in file.tensors.items()}


def load_lora(path: Path, family: ModelFamily, tensors: Mapping[str, Tensor]) -> None:
    """Copy a LoRA, of any program and scale, into a new adapter's tensors with the same output."""
    stored = tensors_of(read_lora(path, f"{family.lora_prefix}.", "lora_init"), family)
    for name, value in stored.items():
        # A layer of a lower rank leaves the rest as it is in a new LoRA: random in lora_A, zero in lora_B.
        tensors[name][tuple(map(slice, value.shape))].copy_(value)
