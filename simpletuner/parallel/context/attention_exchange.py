"""Attention over a sequence whose tokens are split over a group of ranks, with any kernel that SDPA chooses.

`allgather`: each rank's queries attend to the keys and values of all ranks. `alltoall` (Ulysses,
arXiv:2309.14509): each rank attends with its share of the heads over the whole sequence. Ranks may hold
different numbers of tokens.

Attention does not depend on the order of keys, so they stay in the order of ranks: rank 0's part of the text,
its part of the image, rank 1's part of the text, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from simpletuner.private_api.of_torch import functional_collectives as collectives


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share one sequence. Plain values, since torch.compile cannot guard on a process group."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> SequenceGroup:
        return cls(group.group_name, group.size(), group.rank())


class AllGather(torch.autograd.Function):
    """(n, ...) -> (ranks * n, ...). Collective, as is backward, which sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, size: int, name: str) -> Tensor:
        ctx.size, ctx.name = size, name
        return collectives.wait_tensor(collectives.all_gather_into_tensor(rows.contiguous(), size, name))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].contiguous()
        summed = collectives.reduce_scatter_tensor(gradient, "sum", ctx.size, ctx.name)
        return collectives.wait_tensor(summed), None, None


class AllToAll(torch.autograd.Function):
    """Send `sent[r]` rows to rank r, receive `received[r]` from it. Collective; backward swaps both."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        ctx.sent, ctx.received, ctx.name = sent, received, name
        return collectives.wait_tensor(collectives.all_to_all_single(rows.contiguous(), received, sent, name))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = collectives.all_to_all_single(gradients[0].contiguous(), ctx.sent, ctx.received, ctx.name)
        return collectives.wait_tensor(rows), None, None, None


def part_lengths(length: int, ranks: int) -> list[int]:
    """Number of tokens on each rank: they differ by at most one, as in torch.tensor_split."""
    return [length // ranks + (rank < length % ranks) for rank in range(ranks)]


def gather(tensor: Tensor, dim: int, lengths: Sequence[int], group: SequenceGroup) -> Tensor:
    """Concatenate the parts of all ranks along `dim`; `lengths` has each rank's length. Collective."""
    longest = max(lengths)
    rows = tensor.movedim(dim, 0)
    # Padded, since all-gathers of unequal parts are slow with NCCL and impossible with gloo.
    if missing := longest - len(rows):
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    joined: Tensor = AllGather.apply(rows, group.size, group.name)
    if min(lengths) < longest:
        parts = joined.split(longest)
        joined = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return joined.movedim(0, dim)


@dataclass(frozen=True)
class SplitAttention:
    """Self-attention over a sequence that is split over the ranks.

    `streams` are the lengths of the sequences that are concatenated in it (text, image), in this order.
    """

    strategy: str
    streams: tuple[int, ...]
    group: SequenceGroup

    # Not traced: with dynamo_dynamic the compiler takes minutes to reason about the lengths of parts.
    @torch.compiler.disable
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: object,
    ) -> Tensor:
        """SDPA of this rank's tokens; each tensor is (B, heads, tokens, D). Collective."""
        assert query.shape == key.shape == value.shape and not is_causal and dropout_p == 0, "not split attention"
        attend = self.allgather_attention if self.strategy == "allgather" else self.ulysses_attention
        return attend(query, key, value, attn_mask, options)

    def lengths(self) -> list[int]:
        """Number of tokens on each rank, over all streams."""
        parts = [part_lengths(each, self.group.size) for each in self.streams]
        return [sum(of_rank) for of_rank in zip(*parts, strict=True)]

    def allgather_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        # Queries and the output stay where they are: one all-gather forward, one reduce-scatter backward.
        key, value = gather(torch.stack([key, value]), 3, self.lengths(), self.group)
        if mask is not None:
            mask = self.in_order_of_ranks(mask)
            if mask.shape[-2] > 1:
                # A copy: autograd saves this tensor, and a view would keep the rows of all ranks in memory.
                mask = mask.split(self.lengths(), dim=-2)[self.group.rank].contiguous()
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    def ulysses_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        # DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all-to-all from some tokens of all heads
        # to all tokens of some heads, whole attention per head, and back. It sends about 2/ranks of what
        # all-gather does.
        lengths, (size, rank) = self.lengths(), (self.group.size, self.group.rank)
        own = [lengths[rank]] * size
        batch, heads, _, width = query.shape
        # (3, B, ranks, heads, n, D) -> (ranks, n, 3, B, heads, D): the rows for rank 0, those for rank 1, ...
        sent = torch.stack([query, key, value]).unflatten(2, (size, heads // size)).permute(2, 4, 0, 1, 3, 5)
        rows: Tensor = AllToAll.apply(sent.flatten(0, 1), own, lengths, self.group.name)
        query, key, value = rows.permute(1, 2, 3, 0, 4)
        mask = None if mask is None else self.in_order_of_ranks(mask)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        rows = AllToAll.apply(attended.permute(2, 0, 1, 3), lengths, own, self.group.name)
        return rows.unflatten(0, (size, own[0])).permute(2, 0, 3, 1, 4).reshape(batch, heads, own[0], width)

    def in_order_of_ranks(self, mask: Tensor) -> Tensor:
        """Mask (B, 1, 1 or queries, keys) of all tokens in the order of ranks.

        `mask` covers this rank's keys (then collective), or all tokens in the order of the sequence.
        """
        if mask.shape[-1] != sum(self.streams):
            numbers = mask.to(torch.uint8) if mask.dtype == torch.bool else mask  # gloo gathers no bool
            return gather(numbers, 3, self.lengths(), self.group).to(mask.dtype)
        if len(self.streams) == 1:
            return mask
        tokens = torch.arange(mask.shape[-1], device=mask.device).split(self.streams)
        parts = [each.tensor_split(self.group.size) for each in tokens]
        order = torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
        mask = mask.index_select(-1, order)
        return mask.index_select(-2, order) if mask.shape[-2] > 1 else mask


class AttentionOverride(TorchFunctionMode):
    """Call `attend` instead of scaled_dot_product_attention, except within `attend` itself, where the mode is
    off.

    `calls` gets an element per call: a list, since torch.compile cannot trace assignments to a mode's
    attributes.
    """

    def __init__(self, attend: Callable[..., Tensor], calls: list[bool]) -> None:
        super().__init__()
        self.attend, self.calls = attend, calls

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls.append(True)
        return self.attend(*args, **(kwargs or {}))
