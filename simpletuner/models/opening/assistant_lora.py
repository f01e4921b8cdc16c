"""Assistant LoRAs: merged into the frozen base, below the LoRA that is trained and exported without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from simpletuner.errors import SettingsError
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.opening.foreign_lora import read_foreign
from simpletuner.models.opening.lora_file import kind_of, lora_file, read_header, without_prefix
from simpletuner.parallel.precision.quantized import rows_of
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.settings.declared.sections import Settings

Deltas = Mapping[str, list[tuple[Tensor, Tensor]]]
"""Pairs of matrices (rank, inputs) and (outputs, rank) by the name of the weight that their product is added to."""


def assistant_files(settings: Settings) -> list[Path]:
    """Return the files that assistant_lora names."""
    return [lora_file(name) for name in settings.lora.assistant_lora]


def read_assistants(family: ModelFamily) -> Deltas:
    """Read all assistants, scaled by assistant_lora_strength.

    Raises SettingsError for what is no LoRA of the denoiser, EnvironmentNotReady for a file that cannot be read.
    """
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for path in assistant_files(family.settings):
        matrices = read_scaled(path, family)
        for name, down in matrices.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                up = matrices[f"{layer}.lora_B.weight"] * family.settings.lora.assistant_lora_strength
                found.setdefault(f"{layer}.weight", []).append((down.flatten(1), up.flatten(1)))
    return found


def read_scaled(path: Path, family: ModelFamily) -> dict[str, Tensor]:
    """Return a LoRA's matrices by our names, with its scale in lora_B."""
    shapes, config = read_header(path, family, "assistant_lora")
    if kind_of(shapes) != "lora":
        raise SettingsError(
            f"assistant_lora: {path} is of lora_type {kind_of(shapes)}, which is not merged", "take a LoRA"
        )
    if not config:
        matrices = read_foreign(path, family, "assistant_lora")
    else:
        scale = config["lora_alpha"] / config["r"]
        stored = {without_prefix(name, family): each for name, each in safetensors.torch.load_file(path).items()}
        matrices = {name: each * scale if name.endswith(".lora_B.weight") else each for name, each in stored.items()}
    weights = {name: tuple(each.shape) for name, each in family.meta_denoiser.named_parameters()}
    for name, matrix in matrices.items():
        shape = weights.get(f"{name.rpartition('.lora_')[0]}.weight")
        fits = shape and (matrix.shape[1:] == shape[1:] if ".lora_A." in name else matrix.shape[0] == shape[0])
        if not fits:
            raise SettingsError(
                f"assistant_lora: {path} is of another model: {name} does not fit", "take one of the same"
            )
    return matrices


@torch.no_grad()
def merge_assistants(tensors: Mapping[str, Tensor], deltas: Deltas) -> None:
    """Add assistants, in float32, to weights by the base model's names: to whole ones or to this rank's rows."""
    for name, pairs in deltas.items():
        if (tensor := tensors.get(name)) is not None:
            local = local_tensor(tensor.detach())
            for down, up in pairs:
                rows = rows_of(up.float(), tensor).to(local.device)
                local.copy_(local.float() + (rows @ down.float().to(local.device)).view(local.shape))
