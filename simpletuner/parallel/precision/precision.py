"""The numeric formats of a run: how each changes the model, loads the weights, and which engine steps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from simpletuner.parallel.fsdp2 import units_by_class
from simpletuner.parallel.precision.float8 import check_float8, convert_linear_layers
from simpletuner.parallel.precision.int8 import check_torchao, quantize_linear_layers
from simpletuner.parallel.precision.split_engine import SplitEngine, hold_in_bf16, load_split
from simpletuner.parallel.torch_engine import TorchEngine, local_tensor
from simpletuner.settings.declared.sections import Settings

LoadWeights = Callable[[dict[str, Tensor]], None]
"""Fills tensors of a model's state dict by name. Collective."""
MakeEngine = Callable[..., TorchEngine]


@dataclass(frozen=True)
class Precision:
    """Weights in float32, or in the dtype of a frozen base; `float8` computes linear layers of blocks in float8."""

    float8: bool = False

    def check(self, device: torch.device) -> None:
        """Raise EnvironmentNotReady for a GPU or a package that is missing, before anything is encoded."""
        if self.float8:
            check_float8(device)
            check_torchao("float8")

    def prepare(self, model: nn.Module, blocks: tuple[str, ...]) -> None:
        """Change the model on the meta device, before it is sharded."""
        if self.float8:
            convert_linear_layers(model, blocks)

    def load(
        self,
        model: nn.Module,
        blocks: tuple[str, ...],
        device: torch.device,
        parameters_on: torch.device,
        load_weights: LoadWeights,
    ) -> MakeEngine:
        """Allocate this rank's shards, load the weights, and return the engine that steps them. Collective."""
        allocate(model, device, parameters_on)
        return self.fill(model, load_weights)

    def fill(self, model: nn.Module, load_weights: LoadWeights) -> MakeEngine:
        """Load the weights into allocated memory, and return the engine that steps them. Collective."""
        load_weights(model.state_dict())
        return TorchEngine


@dataclass(frozen=True)
class SplitPrecision(Precision):
    """state_layout=split: bf16 weights, 16 bits that complete them to float32, and 8-bit moments."""

    def prepare(self, model: nn.Module, blocks: tuple[str, ...]) -> None:
        hold_in_bf16(model)
        super().prepare(model, blocks)

    def fill(self, model: nn.Module, load_weights: LoadWeights) -> MakeEngine:
        return partial(SplitEngine, load_split(model, load_weights))


@dataclass(frozen=True)
class Int8Base(Precision):
    """base_model_precision=int8: the frozen base of a LoRA, whose linear layers in blocks hold int8."""

    def check(self, device: torch.device) -> None:
        super().check(device)
        check_torchao("base_model_precision=int8")

    def load(
        self,
        model: nn.Module,
        blocks: tuple[str, ...],
        device: torch.device,
        parameters_on: torch.device,
        load_weights: LoadWeights,
    ) -> MakeEngine:
        """Load block by block, so that no more than one block is ever held in the base's own dtype."""
        units = units_by_class(model, blocks)
        names = {module: name for name, module in model.named_modules()}
        inside = {module for unit in units for module in unit.modules()}
        for unit in units:
            allocate(unit, device, device)
            load_weights({f"{names[unit]}.{name}": tensor for name, tensor in unit.state_dict().items()})
            quantize_linear_layers(unit)
        for module in model.modules():
            if module not in inside:
                allocate(module, device, device, recurse=False)
        prefixes = tuple(f"{names[unit]}." for unit in units)
        load_weights({name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefixes)})
        return TorchEngine


def precision_of(settings: Settings) -> Precision:
    float8 = bool(settings.training.float8)
    if settings.lora.base_model_precision == "int8":
        return Int8Base(float8)
    return SplitPrecision(float8) if settings.optimizer.state_layout == "split" else Precision(float8)


def allocate(model: nn.Module, device: torch.device, parameters_on: torch.device, recurse: bool = True) -> None:
    """Give parameters (of this rank's shards only) uninitialized memory; what has values already keeps them."""
    # to_empty() also empties buffers; those that are not in the checkpoint, such as rotary tables, exist only here. So
    # do the matrices of a LoRA.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers(recurse=recurse)}
    shards = {name: local_tensor(each.detach()) for name, each in model.named_parameters(recurse=recurse)}
    held = {name: shard.clone() for name, shard in shards.items() if not shard.is_meta}
    model.to_empty(device=parameters_on, recurse=recurse)
    for name, shard in held.items():
        local_tensor(model.get_parameter(name).detach()).copy_(shard)
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = buffer.to(device)
