"""Kinds of adapters, all of peft's: their configs, the names of their tensors, and their first values.

DoRA: Liu et al. 2024 (arXiv:2402.09353). LoHa: Hyeon-Woo et al. 2021 (arXiv:2108.06098) as LyCORIS has it. LoKr: Yeh et
al. 2023 (arXiv:2309.14859). OFT: Qiu et al. 2023 (arXiv:2306.07280), by Cayley's map as a series.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.errors import SettingsError

LABELS = {"lora": "LoRA", "dora": "DoRA", "loha": "LoHa", "lokr": "LoKr", "oft": "OFT"}
"""Spelling of each lora_type."""

ADAPTER = "default"
"""peft's name of the adapter in the names of parameters; files leave it out."""

TENSOR = re.compile(rf"(?P<layer>.+)\.(?P<kind>lora_\w+|hada_\w+|lokr_\w+|oft_R)\.{ADAPTER}(?P<end>\.weight)?")
"""Names of the parameters that peft adds to a layer."""

MAGNITUDE = "lora_magnitude_vector"
"""DoRA's length of each row of a weight, which files name without `.weight`, as peft's do."""

LINEAR_ONLY = {
    "dora": "the lengths of a convolution's filters are not shared out by rows as its weights are",
    "oft": "peft rotates the inputs of a convolution as if it had no stride and no padding",
}
"""Kinds that cannot adapt a convolution, and why."""


def peft_arguments(kind: str, rank: int, alpha: float, dropout: float, factor: int) -> tuple[str, dict[str, Any]]:
    """Return peft's name of a kind, and the arguments of its config."""
    if kind == "oft":
        return "OFT", {"r": 0, "oft_block_size": rank}
    if kind == "loha":
        return "LOHA", {"r": rank, "alpha": alpha}
    if kind == "lokr":
        return "LOKR", {"r": rank, "alpha": alpha, "decompose_factor": factor}
    dora = {"use_dora": True} if kind == "dora" else {}
    return "LORA", {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, **dora}


def peft_config(name: str, arguments: Mapping[str, Any], modules: Sequence[str]) -> Any:
    from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig

    classes = {"LORA": LoraConfig, "LOHA": LoHaConfig, "LOKR": LoKrConfig, "OFT": OFTConfig}
    return classes[name](**arguments, target_modules=list(modules))


def check_layers(kind: str, rank: int, model: nn.Module, modules: Sequence[str]) -> None:
    """Raise SettingsError for a layer that a kind of adapter cannot adapt."""
    for name in modules:
        layer = model.get_submodule(name)
        if kind in LINEAR_ONLY and not isinstance(layer, nn.Linear):
            raise SettingsError(
                f"lora_type={kind} is for linear layers, and {name} is a convolution: {LINEAR_ONLY[kind]}",
                "leave it out of lora_target_modules, or take lora, loha or lokr",
            )
        if kind == "oft" and isinstance(layer, nn.Linear) and layer.in_features % rank:
            raise SettingsError(
                f"lora_type=oft rotates inputs in blocks of lora_rank = {rank}, which do not divide the "
                f"{layer.in_features} inputs of {name}",
                "take another lora_rank, such as 16 or 32",
            )


def is_adapter(name: str) -> bool:
    return TENSOR.fullmatch(name) is not None


def file_name(name: str) -> str:
    """Return a parameter's name in files, as peft saves it: `to_q.lora_A.default.weight` -> `to_q.lora_A.weight`."""
    match = TENSOR.fullmatch(name)
    assert match is not None
    end = "" if match["kind"] == MAGNITUDE else match["end"] or ""
    return f"{match['layer']}.{match['kind']}{end}"


def allocate_on_cpu(model: nn.Module) -> None:
    """Replace an adapter's parameters on the meta device by ones in host memory, DoRA's lengths by ones."""
    # Not to_empty(): OFT's modules have buffers, which hold values already.
    for name, parameter in [*model.named_parameters()]:
        if is_adapter(name):
            owner, _, leaf = name.rpartition(".")
            filled = torch.ones if MAGNITUDE in name else torch.empty
            value = filled(parameter.shape, dtype=parameter.dtype)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, parameter.requires_grad))


def draw_first_values(layer: Any) -> None:
    """Give a layer's adapter values with which it changes no output yet; random ones by torch's generator."""
    if hasattr(layer, "reset_lora_parameters"):
        layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)
    elif hasattr(layer, "reset_oft_parameters"):
        layer.reset_oft_parameters(ADAPTER, True)
    else:
        layer.reset_adapter_parameters(ADAPTER)


def layer_of(name: str) -> str:
    """Return the layer of a tensor in a file: `to_q.lora_A.weight` -> `to_q`."""
    return re.sub(r"\.(lora|hada|lokr|oft)_\w+(\.weight)?$", "", name)


@torch.no_grad()
def measure_lengths(tensors: Mapping[str, Tensor]) -> None:
    """Set DoRA's lengths to those of the base's rows, by which it changes no output; of a model's tensors by name.

    A rank that holds some rows of a weight holds their lengths, so nothing is exchanged.
    """
    for name, lengths in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is not None and match["kind"] == MAGNITUDE:
            weight = tensors[f"{match['layer']}.base_layer.weight"]
            lengths.copy_(torch.linalg.vector_norm(weight.float(), dim=1))
