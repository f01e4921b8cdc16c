"""Kernels and casts of CUDA on fake tensors of a CPU: a plan is made on a machine without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from simpletuner.private_api.of_torch import tree_map_only


class FusedRMSNorm(torch.autograd.Function):
    """nn.RMSNorm with the saved tensors of CUDA's fused kernel; on the CPU it is several operators, which keep more."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor | None) -> Tensor:
        inverse = values.new_empty(*values.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(values, weight, inverse)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        values, weight, _ = ctx.saved_tensors
        return torch.empty_like(values), None if weight is None else torch.empty_like(weight)


def use_cuda_kernels(model: nn.Module) -> None:
    def fused_rms_norm(values: Tensor, norm: nn.RMSNorm) -> Any:
        autocast = torch.is_autocast_enabled(values.device.type)
        return FusedRMSNorm.apply(values.float() if autocast else values, norm.weight)

    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(fused_rms_norm, norm=module)


FLOAT32_ON_CUDA = frozenset(
    [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "softplus",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "group_norm",
        "frobenius_norm",
        "nuclear_norm",
        "cosine_similarity",
        "poisson_nll_loss",
        "cosine_embedding_loss",
        "nll_loss",
        "nll_loss2d",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "margin_ranking_loss",
        "multilabel_margin_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "multi_margin_loss",
        "binary_cross_entropy_with_logits",
        "dist",
        "pdist",
        "cdist",
        "renorm",
        "logsumexp",
        "upsample_nearest1d",
        "_upsample_nearest_exact1d",
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact3d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "_upsample_bilinear2d_aa",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
        "_upsample_bicubic2d_aa",
        "prod",
        "softmax",
        "log_softmax",
        "cumprod",
        "cumsum",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "sum",
    ]
)
"""Functions that autocast computes in float32 on CUDA (ATen/autocast_mode.h), but in bf16 on a CPU."""

# Names under which Python calls them.
ALIASES = {
    "__pow__": "pow",
    "__rpow__": "pow",
    "interpolate": "upsample_bilinear2d",
    "vector_norm": "linalg_vector_norm",
}


class CudaAutocast(TorchFunctionMode):
    """Within the CPU's autocast, compute in float32 what that of CUDA does: activations are up to a third larger."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if ALIASES.get(name, name) in FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, in_float32, (args, kwargs))
        return func(*args, **(kwargs or {}))


def in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
