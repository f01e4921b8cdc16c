"""Linear layers in float8 by torchao: products of 8-bit numbers, over weights that keep their own precision."""

from __future__ import annotations

import torch
from torch import nn

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.fsdp2 import units_by_class

FIRST_CAPABILITY = (8, 9)
"""CUDA compute capability of Ada; Hopper is 9.0. Older GPUs multiply no 8-bit floating-point numbers."""

MULTIPLE = 16
"""Of this the sides of matrices must be (torch._scaled_mm)."""


def check_float8(device: torch.device) -> None:
    """Raise EnvironmentNotReady where a device cannot multiply in float8."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise EnvironmentNotReady("float8 needs an NVIDIA GPU of the Ada generation or newer", "leave float8 out")
    if torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise EnvironmentNotReady(f"{name} has no float8, which came with Ada and Hopper", "leave float8 out")


def convert_linear_layers(model: nn.Module, blocks: tuple[str, ...], emulate: bool = False) -> None:
    """Let the linear layers of the blocks compute in float8, scaled per tensor by its largest value at each use.

    Parameters and their names stay. `emulate` computes with float8 values in the layer's dtype, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Rows are padded: those of a modulation layer are as many as samples.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    for unit in units_by_class(model, blocks):
        convert_to_float8_training(unit, module_filter_fn=gains, config=config)


def gains(layer: nn.Module, name: str) -> bool:
    """Return whether a layer is multiplied in float8: not a LoRA's, whose products are small and whose updates are."""
    of_lora = {"lora_A", "lora_B"} & {*name.split(".")}
    return isinstance(layer, nn.Linear) and not (
        of_lora or layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
    )
