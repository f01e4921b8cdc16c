"""The query, key and value projections of attention as one product, by diffusers' fused processors.

Weights stay where they are, under their published names, and are concatenated at each call: 1 % of the product's time
for a batch of FLUX. So checkpoints, EMA, sharding and the optimizer are the same with and without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

PARTS = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
"""Diffusers' names of a fused layer and of its parts."""


class FusedLinear:
    """Linear layers over one input as one product. No module, so that their weights have no second name."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)

    def __call__(self, x: Tensor) -> Tensor:
        weight = torch.cat([layer.weight for layer in self.layers])
        biases: list[Tensor] = [layer.bias for layer in self.layers if layer._parameters["bias"] is not None]
        return functional.linear(x, weight, torch.cat(biases) if biases else None)


def fuse_qkv(model: nn.Module) -> None:
    """Fuse the projections of all attention modules, in place, of a model on the meta device."""
    model.fuse_qkv_projections()  # pyright: ignore[reportCallIssue]
    for module in list(model.modules()):
        for name, parts in PARTS.items():
            if isinstance(getattr(module, name, None), nn.Linear):
                delattr(module, name)  # a layer with weights of its own
                setattr(module, name, FusedLinear([module.get_submodule(part) for part in parts]))  # pyright: ignore[reportArgumentType]
