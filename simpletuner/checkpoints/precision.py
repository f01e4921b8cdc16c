"""The precision of exported weights: each tensor is rounded once, when it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from simpletuner.checkpoints.tensors import GroupPlan, MadeWhenWritten, TensorGroup
from simpletuner.models.family.adapter import is_kept_in_float32
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.folder.safetensors_dtypes import PRECISIONS
from simpletuner.parallel.model.blocks import block_paths

EIGHT_BITS = torch.float8_e4m3fn


def exported_dtypes(family: ModelFamily, stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Return the dtype in which each weight of the denoiser is written; `stored` has those that they have.

    float8 is for the linear layers of the repeated blocks, as files named `fp8_e4m3fn` have it; what else is
    in float32 becomes bf16. Modules that diffusers keeps in float32 stay as they are in 8 and 16 bits.
    """
    precision = family.settings.checkpoints.export_precision
    if precision is None:
        return {**stored}
    model, eight = family.meta_denoiser, weights_of_blocks(family) if precision == "float8" else frozenset[str]()

    def dtype_of(name: str, own: torch.dtype) -> torch.dtype:
        if not own.is_floating_point or (precision != "fp32" and is_kept_in_float32(model, name)):
            return own
        if precision in PRECISIONS:
            return PRECISIONS[precision]
        if name in eight:
            return EIGHT_BITS
        return torch.bfloat16 if own.itemsize > torch.bfloat16.itemsize else own

    return {name: dtype_of(name, own) for name, own in stored.items()}


def weights_of_blocks(family: ModelFamily) -> frozenset[str]:
    """Weights of the linear layers in the denoiser's repeated blocks, the others of which are few."""
    model = family.meta_denoiser
    paths = tuple(f"{path}." for path in block_paths(model, family.block_classes))
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return frozenset(f"{name}.weight" for name in linear if name.startswith(paths))


def in_precision(group: TensorGroup, dtypes: Mapping[str, torch.dtype]) -> TensorGroup:
    """Return a group whose tensors have these dtypes; a rank rounds its own rows of each as it is written."""
    plan = group.plan
    if all(dtypes[name] == each.dtype for name, each in plan.tensors.items()):
        return group
    changed = {name: replace(each, dtype=dtypes[name]) for name, each in plan.tensors.items()}
    # Larger elements first, for alignment; the order of equal ones stays, which balances the ranks.
    tensors = dict(sorted(changed.items(), key=lambda item: -item[1].dtype.itemsize))
    shards = {name: plan.shards[name] for name in tensors if name in plan.shards}
    local = MadeWhenWritten(shards, lambda name: rounded(group.local[name], dtypes[name]))
    return replace(group, plan=GroupPlan(tensors, shards), local=local, block=None)


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype; what exceeds its largest number becomes that, not infinite or NaN."""
    if dtype == tensor.dtype:
        return tensor
    if dtype.itemsize < tensor.dtype.itemsize:
        tensor = tensor.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return tensor.to(dtype)
