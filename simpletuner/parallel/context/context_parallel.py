"""Context parallelism: each rank of a group computes a part of the tokens of the same samples.

The denoiser's inputs and its output are whole on every rank, so the code around it is the same with and
without a split. Inside, hooks take this rank's part of the tokens, attention exchanges keys and values or
heads (attention_exchange.py), and the output is gathered. All collectives have exact adjoints, so backward
computes the gradient of the sum of all ranks' losses; these are equal within a group, so that FSDP2's mean
over the group is the gradient of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from simpletuner.errors import TrainingError
from simpletuner.parallel.context.attention_exchange import (
    AttentionOverride,
    SequenceGroup,
    SplitAttention,
    gather,
    part_lengths,
)
from simpletuner.private_api.of_diffusers import context_parallel_splits


@dataclass(frozen=True)
class TokenSplit:
    """Split axis of a sequence, and the number of axes if known, as in diffusers' plans."""

    split_dim: int
    expected_dims: int | None = None
    shared_if_one: bool = False
    """True if an axis of length 1 holds what all tokens share."""


TOKENS = TokenSplit(split_dim=1, expected_dims=3)
TIMES = TokenSplit(split_dim=1, expected_dims=2, shared_if_one=True)
"""Split of times, (B, tokens) or (B, 1)."""

Splits = Mapping[str, Mapping[str | int, TokenSplit]]


@dataclass(frozen=True)
class SequencePlan:
    """Split of a denoiser, by names of modules: `*` is each module of a list, -1 the last one.

    `attention`: self-attention modules, each with the sequences it reads in order (a text, an image).
    `gathered`: modules with an output (B, tokens, ...) to gather from all ranks, and its sequence. `splits`:
    tensors to split by module: arguments by name, or outputs by number. A sequence is named by module and
    argument, as in `blocks.0.hidden_states`. None: use the `_cp_plan` of the denoiser's class in diffusers.
    """

    attention: Mapping[str, tuple[str, ...]]
    gathered: Mapping[str, str]
    splits: Splits | None = None

    def splits_of(self, model: object) -> Splits:
        if self.splits is not None:
            return self.splits
        return {
            name: {key: TokenSplit(each.split_dim, each.expected_dims) for key, each in parts.items()}
            for name, parts in context_parallel_splits(model).items()
            if isinstance(parts, Mapping)
        }


@dataclass
class SplitModel:
    """Group, how attention communicates, and the full length of each sequence in the current forward pass."""

    group: SequenceGroup
    strategy: str
    lengths: dict[str, int] = field(default_factory=dict)

    def part(self, name: str, tensor: Any, split: TokenSplit) -> Any:
        """This rank's part of a tensor; one with other dimensions, such as a timestep, unchanged."""
        if tensor is None or split.expected_dims not in (None, tensor.ndim):
            return tensor
        if split.shared_if_one and tensor.shape[split.split_dim] == 1:
            return tensor
        self.lengths[name] = tensor.shape[split.split_dim]
        # A copy, so that the autograd graph does not keep the whole tensor in memory.
        return tensor.tensor_split(self.group.size, split.split_dim)[self.group.rank].contiguous()

    def attention(self, names: tuple[str, ...]) -> SplitAttention:
        return SplitAttention(self.strategy, tuple(self.lengths[name] for name in names), self.group)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Gather all tokens (B, tokens, ...) of a sequence from this rank's part. Collective."""
        return gather(tensor, 1, part_lengths(self.lengths[name], self.group.size), self.group)


def split_sequence(model: nn.Module, plan: SequencePlan, group: SequenceGroup, strategy: str) -> None:
    """Register hooks that split, exchange and gather, in place, before compiling and sharding."""
    split = SplitModel(group, strategy)
    for pattern, parts in plan.splits_of(model).items():
        for module in modules_of(model, pattern):
            split_tensors(module, pattern, parts, split)
    for pattern, names in plan.attention.items():
        for module in modules_of(model, pattern):
            override_attention(module, names, split)
    for pattern, name in plan.gathered.items():
        for module in modules_of(model, pattern):
            gather_output(module, name, split)


def modules_of(model: nn.Module, pattern: str) -> Iterator[nn.Module]:
    """Yield the modules of a pattern: none if a block lacks it (SD 3.5's optional second attention)."""
    first, _, rest = pattern.partition(".")
    if not first:
        yield model
    elif first == "*":
        for child in model.children():
            yield from modules_of(child, rest)
    elif isinstance(model, nn.ModuleList):
        yield from modules_of(model[int(first)], rest)
    elif (child := getattr(model, first)) is not None:
        yield from modules_of(child, rest)


def split_tensors(module: nn.Module, place: str, parts: Mapping[str | int, TokenSplit], split: SplitModel) -> None:
    """Split arguments of a module's forward before it runs, and outputs after it."""
    positions = {name: number for number, name in enumerate(inspect.signature(module.forward).parameters)}
    inputs = {name: each for name, each in parts.items() if isinstance(name, str)}
    outputs = {number: each for number, each in parts.items() if isinstance(number, int)}

    def split_inputs(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        positional = list(args)
        for name, each in inputs.items():
            at, sequence = positions[name], f"{place}.{name}".removeprefix(".")
            if name in kwargs:
                kwargs = kwargs | {name: split.part(sequence, kwargs[name], each)}
            elif at < len(positional):
                positional[at] = split.part(sequence, positional[at], each)
        return tuple(positional), kwargs

    def split_outputs(_: nn.Module, __: object, output: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(
            split.part(f"{place}.{number}", value, outputs[number]) if number in outputs else value
            for number, value in enumerate(output)
        )

    if inputs:
        module.register_forward_pre_hook(split_inputs, with_kwargs=True)
    if outputs:
        module.register_forward_hook(split_outputs)


def gather_output(module: nn.Module, name: str, split: SplitModel) -> None:
    def gather_whole(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return split.whole(name, output)

    module.register_forward_hook(gather_whole)


def override_attention(module: nn.Module, names: tuple[str, ...], split: SplitModel) -> None:
    """Make a module's self-attention span the whole sequence. Raises TrainingError if it bypasses SDPA."""
    own_forward = module.forward

    # `forward` and not hooks: gradient checkpointing may stop a recomputation early by an exception, which
    # skips forward hooks but leaves a `with` block, so the mode is always switched off.
    def forward(*args: object, **kwargs: object) -> object:
        calls: list[bool] = []
        attention: Any = split.attention(names)
        with AttentionOverride(attention.attend, calls):
            output = own_forward(*args, **kwargs)
        if len(calls) != 1:
            raise TrainingError(
                f"{type(module).__name__} called torch's scaled_dot_product_attention {len(calls)} times, not once, so "
                "context parallelism cannot exchange its keys and values",
                "unset DIFFUSERS_ATTN_BACKEND, or leave context_parallel_size out",
            )
        return output

    module.forward = forward
