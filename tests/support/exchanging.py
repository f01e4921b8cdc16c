"""Attention over a sequence that ranks share, beside attention over the whole of it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from simpletuner.parallel.context.attention_exchange import SequenceGroup, SplitAttention
from simpletuner.parallel.world import joined_world

BATCH, HEADS, WIDTH = 2, 6, 4
STREAMS = {"text and image": (5, 8), "image": (13,)}
"""Lengths that three ranks cannot share equally."""


def part_of(tensor: Tensor, dim: int, streams: tuple[int, ...], group: SequenceGroup) -> Tensor:
    """Return this rank's tokens: its part of each stream."""
    parts = [each.tensor_split(group.size, dim)[group.rank] for each in tensor.split(streams, dim)]
    return torch.cat(parts, dim)


def masks_of(length: int) -> dict[str, Tensor | None]:
    """Return masks as pipelines make them; each keeps some key for every query."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.rand(BATCH, 1, 1, length, generator=generator) < 0.7
    keys[..., 0] = True
    return {
        "none": None,
        "of keys": keys,
        "of queries and keys": torch.randn(BATCH, 1, length, length, generator=generator),
        "of this rank's keys": keys,
    }


def attend_in_turn(report: str) -> None:
    """Write the largest error of any rank, of outputs and of gradients, by streams, strategy and mask."""
    with joined_world() as world:
        assert dist.group.WORLD is not None
        group, errors = SequenceGroup.of(dist.group.WORLD), {}
        for streams_name, streams in STREAMS.items():
            for strategy in ("allgather", "alltoall"):
                for mask_name, mask in masks_of(sum(streams)).items():
                    error = error_of(SplitAttention(strategy, streams, group), mask_name, mask)
                    dist.all_reduce(error, dist.ReduceOp.MAX)
                    errors[f"{streams_name}, {strategy}, mask {mask_name}"] = error.item()
        if world.is_first:
            torch.save(errors, Path(report))


def error_of(split: SplitAttention, mask_name: str, mask: Tensor | None) -> Tensor:
    """Return the largest difference between what a rank has of split attention and its part of whole attention."""
    generator = torch.Generator().manual_seed(0)
    shape, streams, group = (BATCH, HEADS, sum(split.streams), WIDTH), split.streams, split.group
    whole = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    weight = torch.randn(shape, generator=generator)
    expected = functional.scaled_dot_product_attention(*whole, attn_mask=mask)
    gradients = torch.autograd.grad((expected * weight).sum(), whole)
    own = [part_of(each.detach(), 2, streams, group).requires_grad_() for each in whole]
    given = part_of(mask, 3, streams, group) if mask is not None and mask_name == "of this rank's keys" else mask
    output = split.attend(*own, attn_mask=given)
    taken = torch.autograd.grad((output * part_of(weight, 2, streams, group)).sum(), own)
    pairs = zip((output, *taken), (expected, *gradients), strict=True)
    return torch.stack([(one - part_of(other, 2, streams, group)).abs().max().detach() for one, other in pairs]).max()
