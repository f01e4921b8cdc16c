"""Frozen weights in 8 or 4 bits, quantized by torchao and held as plain tensors.

torchao's own tensors are subclasses: autograd would keep a dequantized copy for the backward pass, and FSDP2
cannot shard them. Their parts (values and scales) are parameters like any other: sharded by rows, gathered as
they are, and dequantized for the layer's forward and backward pass.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simpletuner.errors import EnvironmentNotReady
from simpletuner.extras import install_command
from simpletuner.parallel.mesh import mesh_of
from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.private_api import of_torch

NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256
"""Values that share a scale, and scales that share one of theirs (Dettmers et al. 2023, arXiv:2305.14314)."""


# Before, int8 and NF4 were other classes, of other parts (tried: 0.15, 0.16 and 0.17).
FIRST_TORCHAO = (0, 18)


def check_torchao(setting: str) -> None:
    """Raise EnvironmentNotReady if torchao is not installed, too old, or does not fit the installed torch."""
    hint = f"{install_command('torchao')}, or leave {setting.partition('=')[0]} out"
    try:
        importlib.import_module("torchao.quantization")
        installed = version("torchao")
    except ImportError as error:  # PackageNotFoundError is one
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentNotReady(f"{setting} needs torchao 0.18 and a torch that fits it: {reason}", hint) from None
    if tuple(map(int, installed.split(".")[:2])) < FIRST_TORCHAO:
        raise EnvironmentNotReady(f"{setting} needs torchao 0.18 or newer: {installed} is installed", hint)


def to_int8(weight: Tensor) -> object:
    """Quantize to int8 with one scale per row."""
    from torchao.quantization import Int8WeightOnlyConfig

    return by_config(weight, Int8WeightOnlyConfig())


def to_float8(weight: Tensor) -> object:
    from torchao.quantization import Float8WeightOnlyConfig

    return by_config(weight, Float8WeightOnlyConfig())


def to_nf4(weight: Tensor) -> object:
    """Quantize to NormalFloat4 with one scale for 64 values, which are quantized in turn."""
    from torchao.quantization import to_nf4

    return to_nf4(weight, NF4_BLOCK, math.gcd(weight.numel() // NF4_BLOCK, NF4_SCALE_BLOCK))


def by_config(weight: Tensor, config: Any) -> Any:
    from torchao.quantization import quantize_

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(layer, config)
    # torchao binds a method to the layer: a cycle, which keeps the quantized weight until garbage is collected.
    vars(layer).pop("extra_repr", None)
    return layer.weight


QUANTIZERS: dict[str, Callable[[Tensor], object]] = {"int8": to_int8, "float8": to_float8, "nf4": to_nf4}
"""Functions that quantize a weight (outputs, inputs), by the value of base_model_precision."""


@dataclass
class FlattenSpec:
    """Class, names, shapes and context for `__tensor_unflatten__` of a quantized weight."""

    kind: Any
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    context: Any
    size: torch.Size

    @classmethod
    def of(cls, weight: Any) -> FlattenSpec:
        names, context = weight.__tensor_flatten__()
        shapes = tuple(getattr(weight, name).shape for name in names)
        return cls(type(weight), tuple(names), shapes, context, weight.shape)

    def dequantize(self, parts: tuple[Tensor, ...]) -> Tensor:
        shaped = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        stride = (self.size[1], 1)
        weight = self.kind.__tensor_unflatten__(shaped, self.context, self.size, stride)
        # `dequantize` of an NF4Tensor is a function of other arguments.
        return weight.get_original_weight() if hasattr(self.kind, "get_original_weight") else weight.dequantize()


class FrozenProduct(torch.autograd.Function):
    """x W^T + b, dequantizing the weight in each pass and keeping only its parts between them."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor | None, spec: FlattenSpec, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.spec = spec
        return F.linear(inputs, spec.dequantize(parts), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        parts = ctx.saved_tensors  # once: recomputation gives each saved tensor out a single time
        weight = ctx.spec.dequantize(parts).to(gradient.dtype)
        return gradient @ weight, None, None, *(None for _ in parts)


class Int8Product(torch.autograd.Function):
    """x W^T + b as a product of int8 in both passes: inputs and gradients are quantized row by row, each
    with a scale of its own, and weights have one per output."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor | None, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        values, scale, _ = parts  # the third is a zero point, which is 0: torchao quantizes symmetrically
        ctx.save_for_backward(*parts)
        product = int8_product(inputs, values.t()) * scale.flatten()
        return product.to(dtype) if bias is None else (product + bias).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        values, scale, zero = ctx.saved_tensors
        # Column-major, as in the forward pass: cuBLAS has no product of two row-major matrices of int8 on all
        # GPUs (A100: CUBLAS_STATUS_NOT_SUPPORTED, https://github.com/pytorch/pytorch/issues/169956).
        product = int8_product(gradient * scale.flatten(), values.t().contiguous().t())
        return product.to(gradient.dtype), None, None, *(None for _ in (values, scale, zero))


def int8_product(left: Tensor, right_int8: Tensor) -> Tensor:
    """Return left (..., K) times right (K, N) in float32, with each row of `left` quantized to int8."""
    rows = left.flatten(0, -2).float()
    scale = (rows.abs().amax(-1, keepdim=True) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    product = of_torch.int8_matmul((rows / scale).round_().to(torch.int8), right_int8)
    return (product.float() * scale).unflatten(0, left.shape[:-1])


# Versions of torch (2.12 was not tried; 2.9, 2.10, 2.13 and 2.15 are right) that trace the forward of
# `Int8Product` through int8 and take its result for one without a gradient: layers before it learned
# nothing, with no word.
ZERO_GRADIENTS = ("2.11", "2.12")


def trace_as_one(product: type[torch.autograd.Function]) -> None:
    """Have torch.compile call a product as it is where it would trace it wrongly."""
    if torch.__version__.startswith(tuple(f"{each}." for each in ZERO_GRADIENTS)):
        torch.compiler.allow_in_graph(product)


# Smallest number of input rows for cuBLAS's int8 product. Modulations have fewer, and little work.
FEWEST_ROWS = 17


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose weight is held as the parts that torchao quantizes it to.

    `in_int8` also computes with int8, where the weight is in it.
    """

    def __init__(self, layer: nn.Linear, quantize: Callable[[Tensor], object], in_int8: bool = False) -> None:
        super().__init__()
        self.in_int8 = in_int8
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype, self.quantize, self.bias = layer.weight.dtype, quantize, layer.bias
        weight = quantize(layer.weight.detach())
        self.spec = FlattenSpec.of(weight)
        for name in self.spec.names:
            # FSDP2 shards rows; a tensor without dimensions, such as the mean of NF4's scales, has none.
            part = torch.atleast_1d(getattr(weight, name))
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.in_int8 and inputs.shape[:-1].numel() >= FEWEST_ROWS:
            return Int8Product.apply(inputs, self.bias, self.dtype, *self.parts())
        return FrozenProduct.apply(inputs, self.bias, self.spec, *self.parts())

    def parts(self) -> list[nn.Parameter]:
        return [self.get_parameter(name) for name in self.spec.names]

    @property
    def weight(self) -> Tensor:
        """The weight in its own dtype (outputs, inputs), made anew at each call."""
        return self.spec.dequantize(tuple(self.parts()))

    @property
    def whole_bytes(self) -> int:
        return self.in_features * self.out_features * self.dtype.itemsize

    def empty_weight(self) -> Tensor:
        """Allocate a whole weight where this rank's rows are."""
        device = local_tensor(self.parts()[0].detach()).device
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=device)

    @torch.no_grad()
    def quantize_from(self, weight: Tensor) -> None:
        """Quantize a whole weight, and keep this rank's rows of its parts."""
        quantized = self.quantize(weight)
        self.spec = FlattenSpec.of(quantized)
        for name, part in zip(self.spec.names, self.parts(), strict=True):
            local_tensor(part.detach()).copy_(rows_of(torch.atleast_1d(getattr(quantized, name)), part))


def rows_of(whole: Tensor, like: Tensor) -> Tensor:
    """Rows of a whole tensor that belong to this rank's shard of `like`."""
    if (mesh := mesh_of(like)) is None:
        return whole
    chunks, rank = whole.chunk(mesh.size(-1)), mesh.get_local_rank(-1)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def replace_linear_layers(unit: nn.Module, precision: str, in_int8: bool = False) -> None:
    """Replace the frozen linear layers of a unit on the meta device by quantized ones.

    A LoRA's own layers stay, and with NF4 those whose weights are no multiple of its block.
    """
    if in_int8:
        trace_as_one(Int8Product)
    for parent in [*unit.modules()]:
        for name, layer in parent.named_children():
            if type(layer) is not nn.Linear or layer.weight.requires_grad:
                continue
            if precision != "nf4" or layer.weight.numel() % NF4_BLOCK == 0:
                setattr(parent, name, QuantizedLinear(layer, QUANTIZERS[precision], in_int8))
