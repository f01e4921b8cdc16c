"""Assistant LoRAs: merged into the frozen base, below the LoRA that is trained and exported without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.lora_config import read_lora
from simpletuner.models.opening.lora_file import lora_file, read_layers
from simpletuner.parallel.precision.quantized import rows_of
from simpletuner.parallel.precision.split_engine import LOAD_BYTES, groups_of_bytes
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.settings.declared.sections import Settings

Deltas = Mapping[str, list[tuple[Tensor, Tensor]]]
"""Pairs of matrices (rank, inputs), (outputs, rank) by the name of the weight to add their product to."""


def assistant_files(settings: Settings) -> list[Path]:
    return [lora_file(name) for name in settings.lora.assistant_lora]


def read_assistants(family: ModelFamily) -> Deltas:
    """Read all assistants, scaled by assistant_lora_strength.

    Raises SettingsError for what is no LoRA of the denoiser, EnvironmentNotReady for a file that cannot be
    read.
    """
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for path in assistant_files(family.settings):
        for name, (down, up) in read_products(path, family).items():
            found.setdefault(name, []).append((down, up * family.settings.lora.assistant_lora_strength))
    return found


def read_products(path: Path, family: ModelFamily) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the matrices whose product a LoRA adds to a weight or a bias, at its own scale."""
    file = read_lora(path, f"{family.lora_prefix}.", "assistant_lora")
    if file.kind != "lora":
        raise file.error(f"is of lora_type {file.kind}, which is not merged", "take a LoRA")
    file.check_config()
    matrices = read_layers(file, family)
    shapes = {name: tuple(each.shape) for name, each in family.meta_denoiser.named_parameters()}
    found = {}
    for name, up in matrices.items():
        layer = name.rpartition(".lora_")[0]
        if name.endswith(".lora_B.bias"):
            added, down, up = f"{layer}.bias", torch.ones(1, 1), up[:, None]
        elif name.endswith(".lora_B.weight"):
            added, down = f"{layer}.weight", matrices[f"{layer}.lora_A.weight"]
        else:
            continue
        shape = shapes.get(added)
        if shape is None:
            raise file.error(f"has lora_bias, but {layer} has no bias to add it to")
        if up.shape[0] != shape[0] or (added.endswith(".weight") and down.shape[1:] != shape[1:]):
            raise file.error(f"is of another model: its matrices for {layer} do not fit", "take one of the same")
        found[added] = (down.flatten(1), up.flatten(1))
    return found


@torch.no_grad()
def read_merged(read: Callable[[Mapping[str, Tensor]], None], tensors: Mapping[str, Tensor], deltas: Deltas) -> None:
    """Collective: `read` tensors by name and add assistants in float32, so that bf16 is rounded to once."""
    merged = {name: each.detach() for name, each in tensors.items() if name in deltas}
    if others := {name: each for name, each in tensors.items() if name not in deltas}:
        read(others)
    for group in groups_of_bytes(merged, LOAD_BYTES):
        exact = {name: torch.empty_like(each, dtype=torch.float32) for name, each in group.items()}
        read(exact)
        merge_assistants(exact, deltas)
        for name, each in group.items():
            local_tensor(each).copy_(local_tensor(exact[name]))


@torch.no_grad()
def merge_assistants(tensors: Mapping[str, Tensor], deltas: Deltas) -> None:
    """Add assistants to float32 weights by the base model's names: whole, or this rank's rows."""
    for name, pairs in deltas.items():
        if (tensor := tensors.get(name)) is not None:
            local = local_tensor(tensor.detach())
            for down, up in pairs:
                rows = rows_of(up.float(), tensor).to(local.device)
                local += (rows @ down.float().to(local.device)).view(local.shape)
