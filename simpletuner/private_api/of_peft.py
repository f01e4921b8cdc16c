"""Private API of peft, with its reason. Seen in peft 0.21."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def apply_low_rank_products(model: nn.Module) -> None:
    """Let linear layers of a LoRA add B A x to their base's output in one function.

    peft converts x to float32, which autocast converts back, and scales and adds B A x apart
    (findings/peft-lora-converts-inputs-twice.sh). FLUX.1-dev with 266 such layers kept an H200 waiting for its host,
    which launches them: it was busy for 0.71 of 0.98 s. A layer with dropout or DoRA stays with peft.
    """
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if isinstance(layer, Linear) and not layer.lora_variant:
            layer.forward = MethodType(low_rank_forward, layer)


def low_rank_forward(layer: Any, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Return base(x) + scale B A x, (..., outputs)."""
    adapters = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(adapters) != 1 or args or kwargs:
        return type(layer).forward(layer, x, *args, **kwargs)
    (name,) = adapters
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    # ZeRO-3 gathers a matrix where its own module is called, and until then it is empty.
    if a.numel() == 0 or not isinstance(layer.lora_dropout[name], nn.Identity):
        return type(layer).forward(layer, x)
    x, a, b = as_autocast(x, a, b)
    result = layer.base_layer(x)
    x = layer._cast_input_dtype(x, a.dtype)
    return LowRankProduct.apply(result.to(a.dtype), x, a, b, layer.scaling[name]).to(result.dtype)


class LowRankProduct(torch.autograd.Function):
    """Y = R + scale (X A^T) B^T for each token, where R is the base layer's output."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        reduced = x.flatten(0, -2) @ a.T
        ctx.save_for_backward(x, a, b, reduced)
        ctx.scale = scale
        return torch.addmm(result.flatten(0, -2), reduced, b.T, alpha=scale).view(result.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, a, b, reduced = ctx.saved_tensors
        of_y = gradient.flatten(0, -2)
        of_reduced = of_y @ b
        if ctx.scale != 1:  # by default alpha is the rank
            of_reduced, reduced = of_reduced * ctx.scale, reduced * ctx.scale
        of_x = (of_reduced @ a).view(x.shape) if ctx.needs_input_grad[1] else None
        return gradient, of_x, of_reduced.T @ x.flatten(0, -2), of_y.T @ reduced, None


def as_autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield tensors in the dtype that autocast computes products in, where it is enabled."""
    x = tensors[0]
    device = "cpu" if x.is_meta else x.device.type  # FLOPs are counted on meta, unknown to autocast
    enabled = torch.is_autocast_enabled(device)
    yield from (each.to(torch.get_autocast_dtype(device)) for each in tensors) if enabled else tensors


def apply_kronecker_products(model: nn.Module) -> None:
    """Let LoKr's linear layers apply W1 (x) W2 to their inputs without computing that product.

    peft computes it in each layer at each call, a matrix as large as the layer's, and multiplies by it: twice
    the products of a frozen layer. A step of SDXL's LoKr of factor 16 was 21,492 launches on an H100, for
    which the host took 0.83 s and the GPU 0.15.
    """
    from peft.tuners.lokr import Linear

    for layer in model.modules():
        if isinstance(layer, Linear):
            vars(layer)["_get_delta_activations"] = MethodType(kronecker_activations, layer)


def kronecker_activations(layer: Any, adapter: str, x: Tensor, *_: object, **__: object) -> Tensor:
    """Return (W1 (x) W2) x, (..., outputs)."""
    w1, w2 = factor_of(layer, "lokr_w1", adapter), factor_of(layer, "lokr_w2", adapter)
    if (scale := layer.scaling[adapter]) != 1:
        w1 = w1 * scale
    x = layer._cast_input_dtype(x, w2.dtype)
    return KroneckerProduct.apply(*as_autocast(x, w1, w2))


class KroneckerProduct(torch.autograd.Function):
    """Y = (W1 X) W2^T per token, where X is (inputs of W1, inputs of W2), Y (outputs of W1, outputs of W2).

    Keeps x alone of what is as large: W1 X is computed again in the backward pass, at factor / outputs of the
    layer's own FLOPs, 1/40 to 1/80 in SDXL at a factor of 16. Products in batches read and write matrices as
    they lie; F.linear would have both transposed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ctx.save_for_backward(x, w1, w2)
        return F.linear(mix(x, w1, w2), w2).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w1, w2 = ctx.saved_tensors
        gradient = gradient.reshape(-1, w1.shape[0], w2.shape[0])
        of_w2 = gradient.flatten(0, 1).T @ mix(x, w1, w2).flatten(0, 1)
        of_mixed = gradient @ w2
        of_w1 = torch.bmm(of_mixed, x.reshape(-1, w1.shape[1], w2.shape[1]).mT).sum(0)
        of_x = (
            torch.bmm(w1.T.expand(len(of_mixed), -1, -1), of_mixed).view(x.shape) if ctx.needs_input_grad[0] else None
        )
        return of_x, of_w1, of_w2


def mix(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    matrices = x.reshape(-1, w1.shape[1], w2.shape[1])
    return torch.bmm(w1.expand(len(matrices), -1, -1), matrices)


def factor_of(layer: object, name: str, adapter: str) -> Tensor:
    whole = getattr(layer, name)
    if adapter in whole:
        return whole[adapter]
    return getattr(layer, f"{name}_a")[adapter] @ getattr(layer, f"{name}_b")[adapter]
