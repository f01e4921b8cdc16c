"""The frozen base of a LoRA in int8: weights alone, by torchao."""

from __future__ import annotations

import importlib

from torch import nn

from simpletuner.errors import EnvironmentNotReady


def check_torchao(setting: str) -> None:
    """Raise EnvironmentNotReady where torchao is not installed, or does not fit the installed torch."""
    try:
        importlib.import_module("torchao.quantization")
    except ImportError as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentNotReady(
            f"{setting} needs torchao: {reason}",
            f"pip install 'simpletuner[int8]', or leave {setting.partition('=')[0]} out",
        ) from None


def quantize_linear_layers(module: nn.Module) -> None:
    """Replace the weights of linear layers by int8 with one scale per row; they are multiplied in the layer's dtype."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module, Int8WeightOnlyConfig(), is_frozen_linear)


def is_frozen_linear(module: nn.Module, _: str) -> bool:
    """Return whether a layer belongs to the base, not to the LoRA within it."""
    return isinstance(module, nn.Linear) and not module.weight.requires_grad
