"""Numeric formats of a run: changes to the model, loading of weights, and the engine that steps them.

float8 computes linear layers by torchao: 8-bit products over weights in their own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.fsdp2 import units_by_class
from simpletuner.parallel.mesh import mesh_of
from simpletuner.parallel.precision.quantized import QuantizedLinear, check_torchao, replace_linear_layers
from simpletuner.parallel.precision.split_engine import SplitEngine, hold_in_bf16, load_split
from simpletuner.parallel.torch_engine import TorchEngine, local_tensor
from simpletuner.settings.declared.sections import Settings

# CUDA compute capability of Ada; Hopper is 9.0. Older GPUs multiply no 8-bit floating-point numbers.
FIRST_CAPABILITY = (8, 9)

# Divisor of both sides of a float8 matrix (torch._scaled_mm).
MULTIPLE = 16


def check_float8(device: torch.device) -> None:
    """Raise EnvironmentNotReady where a device cannot multiply in float8."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise EnvironmentNotReady("float8 needs an NVIDIA GPU of the Ada generation or newer", "leave float8 out")
    if torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise EnvironmentNotReady(f"{name} has no float8, which came with Ada and Hopper", "leave float8 out")


def convert_linear_layers(model: nn.Module, blocks: tuple[str, ...], emulate: bool = False) -> None:
    """Let the linear layers of the blocks compute in float8, scaled per tensor by its largest value at each
    use.

    Parameters and their names stay. `emulate` computes with float8 values in the layer's dtype, on any
    device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Rows are padded: those of a modulation layer are as many as samples.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    for unit in units_by_class(model, blocks):
        convert_to_float8_training(unit, module_filter_fn=gains_from_float8, config=config)


def gains_from_float8(layer: nn.Module, name: str) -> bool:
    """True if a layer gains by float8: not a LoRA's, with their small products and updates."""
    of_lora = {"lora_A", "lora_B"} & {*name.split(".")}
    return isinstance(layer, nn.Linear) and not (
        of_lora or layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
    )


LoadWeights = Callable[[dict[str, Tensor]], None]
"""Fills tensors of a model's state dict by name. Collective."""
MakeEngine = Callable[..., TorchEngine]

GROUP_BYTES = 256 << 20
"""Weights that are read at a time to be quantized: each read looks at the headers of all files."""


@dataclass(frozen=True)
class Precision:
    """Weights in float32, or a frozen base's dtype; `float8` computes blocks' linear layers in float8."""

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
        stepped_by: type[TorchEngine],
    ) -> MakeEngine:
        """Allocate this rank's shards, load the weights, and return the engine that steps them. Collective.

        It is that of the optimizer, unless the weights need another.
        """
        allocate(model, device, parameters_on)
        return self.fill(model, load_weights) or stepped_by

    def fill(self, model: nn.Module, load_weights: LoadWeights) -> MakeEngine | None:
        """Load the weights into allocated memory; return the engine that they need, if any. Collective."""
        load_weights(model.state_dict())


@dataclass(frozen=True)
class SplitPrecision(Precision):
    """state_layout=split: bf16 weights, 16 bits that complete them to float32, and 8-bit moments;
    state_layout=bf16 is the same without those 16 bits."""

    keeps_remainders: bool = True

    def prepare(self, model: nn.Module, blocks: tuple[str, ...]) -> None:
        hold_in_bf16(model)
        super().prepare(model, blocks)

    def fill(self, model: nn.Module, load_weights: LoadWeights) -> MakeEngine:
        if self.keeps_remainders:
            return partial(SplitEngine, load_split(model, load_weights))
        load_weights(model.state_dict())  # which rounds to the nearest
        return partial(SplitEngine, {})


@dataclass(frozen=True)
class QuantizedBase(Precision):
    """base_model_precision: the frozen base of a LoRA, whose linear layers in blocks are quantized."""

    base: str = "int8"
    in_int8: bool = False

    def check(self, device: torch.device) -> None:
        check_torchao(f"base_model_precision={self.base}")

    def prepare(self, model: nn.Module, blocks: tuple[str, ...]) -> None:
        for unit in units_by_class(model, blocks):
            replace_linear_layers(unit, self.base, self.in_int8)

    def fill(self, model: nn.Module, load_weights: LoadWeights) -> None:
        """Load some layers at a time, so that no rank ever holds many weights in the base's own dtype."""
        layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
        for names in grouped({name: layer.whole_bytes for name, layer in layers.items()}, GROUP_BYTES):
            weights = {f"{name}.weight": layers[name].empty_weight() for name in names}
            load_weights(weights)
            for name, weight in zip(names, weights.values(), strict=True):
                layers[name].quantize_from(weight)
        parts = {f"{name}.{part}" for name, layer in layers.items() for part in layer.spec.names}
        load_weights({name: tensor for name, tensor in model.state_dict().items() if name not in parts})


def precision_of(settings: Settings) -> Precision:
    float8 = bool(settings.training.float8)
    if settings.lora.base_model_precision != "no_change":
        own = settings.lora
        return QuantizedBase(base=own.base_model_precision, in_int8=own.base_model_compute == "int8")
    if (layout := settings.optimizer.state_layout) != "fp32":
        return SplitPrecision(float8, keeps_remainders=layout == "split")
    return Precision(float8)


def grouped(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield the names in order, in groups that together have no more than `most` bytes, or one name."""
    group: list[str] = []
    for name, size in sizes.items():
        if group and sum(sizes[each] for each in group) + size > most:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def emptied(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor, which may be on the meta device."""
    if mesh_of(tensor) is not None:
        return torch.empty_like(tensor, device=device)
    # For tensors on meta, empty_like is written in Python, and imports sympy: 0.3 CPU s.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def allocate(model: nn.Module, device: torch.device, parameters_on: torch.device) -> None:
    """Allocate parameters (this rank's shards) without initialization, except those with values."""
    # to_empty() also empties buffers; those that are not in the checkpoint, such as rotary tables, exist only
    # here. So do the matrices of a LoRA.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    shards = {name: local_tensor(each.detach()) for name, each in model.named_parameters()}
    held = {name: shard.clone() for name, shard in shards.items() if not shard.is_meta}
    model._apply(partial(emptied, device=parameters_on))  # as `to_empty` does
    for name, shard in held.items():
        local_tensor(model.get_parameter(name).detach()).copy_(shard)
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = buffer.to(device)
