"""LoRA files layer by layer in their own names: pairs of matrices are read at scale 1 and written again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from simpletuner.models.opening.lora_config import METADATA, PEFT_CONFIG, PEFT_WEIGHTS, LoraFile, read_lora
from simpletuner.models.opening.lora_file import LORA_WEIGHTS, PEFT_PREFIX, lora_file
from simpletuner.system.files.atomic import write_json
from simpletuner.tools.lora.deltas import OTHER_KIND, SUBJECT, OtherLayer, adapter_of, dense

# Names of a LoRA's tensors in any file: the layer as it is called there, and which of its tensors it is.
PART = re.compile(
    r"(?P<layer>.+?)(?P<part>\.alpha|[._](?:lora_linear_layer\.|lora\.)?(?:lora_A|lora_down|down|lora_B|lora_up|up))"
    r"(?P<end>(?:\.default)?(?:\.weight|\.bias)?)"
)

DEPENDS_ON_BASE = {
    "dora": "its lengths are those of the sum with the base's weights, so what it adds is known beside these alone",
    "oft": "it rotates the base's weights, so what it adds is known beside these alone",
}
"""Kinds that have no delta of their own, and why."""

KOHYA_RANK, KOHYA_ALPHA = "ss_network_dim", "ss_network_alpha"


@dataclass
class MatrixPair:
    """Matrices of one layer as in the file, (rank, inputs...) and (outputs, rank...), and any bias."""

    names: dict[str, str] = field(default_factory=dict)
    """The file's name of `down`, `up`, `alpha` and `bias`."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0
    """Of `up` and the bias."""

    @property
    def rank(self) -> int:
        return len(self.tensors["down"])

    def exact(self, part: str) -> Tensor:
        # A copy, which is not kept.
        tensor = self.tensors[part].double()
        return tensor if part == "down" else tensor * self.scale

    def flat(self) -> tuple[Tensor, Tensor]:
        return self.exact("down").flatten(1), self.exact("up").flatten(1)

    def delta(self) -> Tensor:
        """Return what is added to the weight (outputs, inputs...) in float64."""
        down, up = self.flat()
        return (up @ down).view(len(up), *self.tensors["down"].shape[1:])

    def with_matrices(self, down: Tensor, up: Tensor) -> MatrixPair:
        """Return the pair with others (rank, inputs) and (outputs, rank) at scale 1, in its own shapes."""
        own = self.tensors
        shaped = {
            "down": down.reshape(len(down), *own["down"].shape[1:]),
            "up": up.reshape(*up.shape, *own["up"].shape[2:]),
        }
        bias = {"bias": self.exact("bias")} if "bias" in own else {}
        return MatrixPair(self.names, {**shaped, **bias})

    def in_dtype(self, dtype: torch.dtype) -> MatrixPair:
        return MatrixPair(self.names, {part: self.exact(part).to(dtype).contiguous() for part in self.tensors})


@dataclass
class WholeLayer:
    """A layer of LoHa or LoKr: the names of a LoRA's matrices for it, and what makes its delta."""

    names: dict[str, str]
    delta: Callable[[], Tensor]
    """Returns what is added to the weight (outputs, inputs...) in float64; nothing is kept."""


@dataclass
class PairedLora:
    """A LoRA by layers, with its dtype, its file's metadata and peft's config where it is beside it.

    Layers of LoHa and LoKr are whole until made pairs; `file` has the config of the resulting LoRA.
    """

    file: LoraFile
    layers: dict[str, MatrixPair | WholeLayer]
    dtype: torch.dtype
    metadata: dict[str, str]
    is_of_peft: bool

    @property
    def paired(self) -> dict[str, MatrixPair]:
        """The layers, all of which are pairs by now."""
        return {name: each for name, each in self.layers.items() if isinstance(each, MatrixPair)}


def read_pairs(path: Path) -> PairedLora:
    """Read a LoRA, of any program, with text encoders or without.

    Raises SettingsError for DoRA and OFT, and for names that are not known, EnvironmentNotReady for
    a damaged file.
    """
    place = lora_file(path)
    file = read_lora(place, "", SUBJECT)
    if file.kind in DEPENDS_ON_BASE:
        hint = "`simpletuner lora merge` and then `simpletuner lora extract` make a LoRA of it"
        raise file.error(f"is of lora_type {file.kind}: {DEPENDS_ON_BASE[file.kind]}", hint)
    with safe_open(place, framework="pt") as opened:
        metadata = dict(opened.metadata() or {})
    is_of_peft = place.name == PEFT_WEIGHTS and METADATA not in metadata
    dtype = max((each.dtype for each in file.tensors.values() if each.ndim > 1), key=lambda each: each.itemsize)
    if file.kind != "lora":
        return read_whole(file, metadata, dtype)
    layers: dict[str, MatrixPair] = {}
    for name in file.tensors:
        match = PART.fullmatch(name)
        if match is None:
            raise file.error(f"is no LoRA that is known here: it has {name}", "open and write it by diffusers")
        pair = layers.setdefault(match["layer"], MatrixPair())
        part = part_of(match["part"], match["end"])
        pair.names[part] = name
        pair.tensors[part] = file.tensors[name]
    scale_all(file, layers, is_of_peft)
    return PairedLora(file, {**layers}, dtype, metadata, is_of_peft)


def read_whole(file: LoraFile, metadata: Mapping[str, str], dtype: torch.dtype) -> PairedLora:
    """Return a LoHa or LoKr, with what a LoRA of the same layers has for metadata."""
    configs, is_of_peft = configs_of(file, METADATA not in metadata), file.path.name == PEFT_WEIGHTS
    if is_of_peft:  # those that this program writes have their config by the denoiser's name in their metadata, too
        configs = dict(zip([PEFT_PREFIX], configs.values(), strict=True))
    for config in configs.values():
        config.check_config(adapter_of(config))
    own = {name: each for name, each in metadata.items() if name not in (METADATA, "ss_network_args")}
    own |= {"ss_network_module": "networks.lora"} if "ss_network_module" in own else {}
    return PairedLora(as_lora(file, configs, is_of_peft), whole_layers(file, configs), dtype, own, is_of_peft)


def whole_layers(file: LoraFile, configs: Mapping[str, LoraFile]) -> dict[str, MatrixPair | WholeLayer]:
    """Return the layers of a LoHa or LoKr, by their names in the file."""
    parts: dict[str, OtherLayer] = {}
    for name, tensor in file.tensors.items():
        if (match := OTHER_KIND.fullmatch(name)) is None:
            raise file.error(f"is no {file.kind} that is known here: it has {name}", "merge it with its own program")
        layer = name[: match.end("layer")]
        parts.setdefault(layer, OtherLayer(layer)).tensors[match["part"]] = tensor
    found: dict[str, MatrixPair | WholeLayer] = {}
    for layer, each in parts.items():
        config = next((own for prefix, own in configs.items() if layer.startswith(prefix)), replace(file, config={}))
        ends = ("lora_A.weight", "lora_B.weight") if "." in layer else ("lora_down.weight", "lora_up.weight")
        names = {part: f"{layer}.{end}" for part, end in zip(("down", "up"), ends, strict=True)}
        names |= {} if "." in layer else {"alpha": f"{layer}.alpha"}
        found[layer] = WholeLayer(names, partial(delta_of, each, config))
    return found


def delta_of(layer: OtherLayer, file: LoraFile) -> Tensor:
    return dense(OtherLayer(layer.name, {part: each.double() for part, each in layer.tensors.items()}), file)


def as_lora(file: LoraFile, configs: Mapping[str, LoraFile], is_of_peft: bool) -> LoraFile:
    """Return the file of a LoHa or LoKr with a config of a LoRA of the same layers."""
    if is_of_peft:
        targets = configs[PEFT_PREFIX].config.get("target_modules")
        return replace(file, config={"peft_type": "LORA", "target_modules": targets})
    own = {f"{prefix}target_modules": each.config.get("target_modules") for prefix, each in configs.items()}
    return replace(file, config=own)


def part_of(part: str, end: str) -> str:
    if part == ".alpha":
        return "alpha"
    if end.endswith(".bias"):
        return "bias"
    return "down" if part.endswith(("lora_A", "down")) else "up"


def scale_all(file: LoraFile, layers: Mapping[str, MatrixPair], is_of_peft: bool) -> None:
    """Find each layer's scale, and leave `alpha` out."""
    configs = configs_of(file, is_of_peft)
    for config in configs.values():
        config.check_config()
    for name, pair in layers.items():
        if not {"down", "up"} <= pair.tensors.keys():
            raise file.error(f"has one matrix of two for {name}", "copy it again")
        down, up, alpha = (pair.tensors.get(part) for part in ("down", "up", "alpha"))
        assert down is not None and up is not None
        if down.ndim < 2 or up.ndim < 2 or down.shape[0] != up.shape[1] or not down.numel() or not up.numel():
            raise file.error(f"has matrices of {tuple(down.shape)} and {tuple(up.shape)} for {name}")
        if alpha is not None and alpha.numel() != 1:
            raise file.error(f"has an alpha of {alpha.numel()} values for {name}")
        prefix, config = next(
            ((key, each) for key, each in configs.items() if name.startswith(key)), ("", replace(file, config={}))
        )
        scale = config.scale_of(name.removeprefix(prefix), len(down)) if alpha is None else alpha.item() / len(down)
        pair.tensors.pop("alpha", None)
        pair.scale = scale


def configs_of(file: LoraFile, is_of_peft: bool) -> dict[str, LoraFile]:
    """The file with each component's config, by the prefix of the names of its tensors."""
    if is_of_peft:
        return {PEFT_PREFIX: file}
    found: dict[str, dict[str, Any]] = {}
    for key, value in file.config.items():
        component, _, own = key.partition(".")
        found.setdefault(f"{component}.", {})[own] = value
    return {prefix: replace(file, config=config) for prefix, config in found.items()}


def write_pairs(folder: Path, pairs: PairedLora, origin: Mapping[str, str]) -> None:
    """Write a LoRA by its own names, each layer at the scale 1: an alpha is its layer's rank."""
    tensors: dict[str, Tensor] = {}
    for pair in pairs.paired.values():
        own = pair.in_dtype(pairs.dtype).tensors | {"alpha": torch.tensor(float(pair.rank))}
        tensors |= {name: own[part] for part, name in pair.names.items()}
    metadata, config = {"format": "pt", **pairs.metadata, **origin}, with_ranks(pairs)
    if not pairs.is_of_peft and config:
        metadata[METADATA] = json.dumps(config, sort_keys=True)
    if KOHYA_RANK in metadata:
        rank = max(each.rank for each in pairs.paired.values())
        metadata |= {KOHYA_RANK: str(rank), KOHYA_ALPHA: f"{rank:g}"}
    safetensors.torch.save_file(tensors, folder / (PEFT_WEIGHTS if pairs.is_of_peft else LORA_WEIGHTS), metadata)
    if pairs.is_of_peft:
        write_json(folder / PEFT_CONFIG, config)


def with_ranks(pairs: PairedLora) -> dict[str, object]:
    """Return the file's config, of all components, with the layers' ranks and the scale 1."""
    found: dict[str, Any] = {}
    for prefix, file in configs_of(pairs.file, pairs.is_of_peft).items():
        own = {name.removeprefix(prefix): each.rank for name, each in pairs.paired.items() if name.startswith(prefix)}
        if not file.config or not own:
            continue
        rank = max(own.values())
        patterns = {re.escape(name): each for name, each in own.items() if each != rank}
        changed = {"r": rank, "lora_alpha": rank, "rank_pattern": patterns, "alpha_pattern": patterns}
        config = {**file.config, **changed, "use_rslora": False}
        found |= config if pairs.is_of_peft else {f"{prefix}{key}": value for key, value in config.items()}
    return found


def concatenated(pairs: Sequence[MatrixPair], weights: Sequence[float]) -> MatrixPair:
    """Return the weighted sum of what pairs add to one layer: exact, of the sum of their ranks."""
    weighed = [*zip(pairs, weights, strict=True)]
    tensors = {
        "down": torch.cat([pair.exact("down") for pair in pairs]),
        "up": torch.cat([pair.exact("up") * weight for pair, weight in weighed], dim=1),
    }
    biases = [pair.exact("bias") * weight for pair, weight in weighed if "bias" in pair.tensors]
    names = next((pair.names for pair in pairs if "bias" in pair.names), pairs[0].names)
    return MatrixPair(names, tensors | ({"bias": torch.stack(biases).sum(0)} if biases else {}))
