"""Private API of peft, with its reason. Seen in peft 0.21."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def apply_kronecker_products(model: nn.Module) -> None:
    """Let LoKr's linear layers apply W1 (x) W2 to their inputs without computing that product.

    peft computes it in each layer at each call, a matrix as large as the layer's, and multiplies by it: twice the
    products of a frozen layer. A step of SDXL's LoKr of factor 16 was 21,492 launches on an H100, for which the host
    took 0.83 s and the GPU 0.15.
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
    device = "cpu" if x.is_meta else x.device.type  # a count of FLOPs is on meta, of which autocast knows nothing
    if torch.is_autocast_enabled(device):
        x, w1, w2 = (each.to(torch.get_autocast_dtype(device)) for each in (x, w1, w2))
    return KroneckerProduct.apply(x, w1, w2)


class KroneckerProduct(torch.autograd.Function):
    """Y = (W1 X) W2^T for each token, where X is (inputs of W1, inputs of W2) and Y (outputs of W1, outputs of W2).

    Keeps x alone of what is as large: W1 X is computed again in the backward pass, at factor / outputs of the layer's
    own FLOPs, 1/40 to 1/80 in SDXL at a factor of 16. Products in batches read and write matrices as they lie;
    F.linear would have both transposed.
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


def factor_of(layer: Any, name: str, adapter: str) -> Tensor:
    whole = getattr(layer, name)
    if adapter in whole:
        return whole[adapter]
    return getattr(layer, f"{name}_a")[adapter] @ getattr(layer, f"{name}_b")[adapter]
