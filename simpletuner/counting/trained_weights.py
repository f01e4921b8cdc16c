"""The weights that a run trains, counted on the meta device."""

from __future__ import annotations

import torch

from simpletuner.models.family.base import ModelFamily
from simpletuner.parallel.model.blocks import block_paths, count_parameters, recommended_blocks
from simpletuner.parallel.moments import TrainedWeights


def trained_weights(family: ModelFamily) -> TrainedWeights:
    """Return the shapes of what a run trains, as its optimizer is given them."""
    model, saved = family.meta_denoiser, {name: torch.Size(shape) for name, shape in family.trained_shapes().items()}
    trained, count = saved, sum(map(torch.Size.numel, saved.values()))
    if family.adapter is None:
        trained = {name: each.shape for name, each in model.named_parameters() if each.requires_grad}
    blocks = block_paths(model, recommended_blocks(model))
    shapes = [(tuple(shape), is_hidden_matrix(name, len(shape), blocks)) for name, shape in trained.items()]
    return TrainedWeights(shapes, count_parameters(model) if family.adapter is None else count, count)


def is_hidden_matrix(name: str, dimensions: int, blocks: tuple[str, ...]) -> bool:
    """True for the weight of a linear layer inside a block.

    Embeddings and the first and last layers are outside; tables of shifts and scales, though 2-D, are no `weight`.
    """
    is_inside = any(name.startswith(f"{block}.") for block in blocks)
    return is_inside and name.endswith(".weight") and dimensions == 2
