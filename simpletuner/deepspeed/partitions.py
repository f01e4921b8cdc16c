"""Where DeepSpeed keeps the slices of float32 masters and moments, and how they are written.

It has three optimizers around ours: one for stages 1 and 2, one for stage 1 in bf16 with float32 gradients, one for
stage 3. The first two flatten a parameter group and give each rank an equal interval of it, so a parameter may lie on
one rank, on several, or on this one not at all. Stage 3 gives each rank an equal interval of every parameter, padded at
the end, and may keep groups of them on disk. Nothing of what is used here is promised by DeepSpeed but `_hp_mapping`
and `update_lp_params`; tests/test_zero.py is what holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from simpletuner.deepspeed.row_shards import Interval
from simpletuner.parallel.torch_engine import ShardUpdate


class Fragments(Protocol):
    """This rank's slices of all trainable parameters; `of` is a moment, or empty for the masters."""

    def interval(self, name: str) -> Interval:
        """Return which elements of a parameter this rank has."""
        ...

    def pieces(self, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's slice (1-D), the same names in the same order on all ranks; valid until the next."""
        ...

    def rewrite(self, change: ShardUpdate, of: str = "") -> None:
        """Let `change` write into every slice; after masters the weights that compute follow. All ranks take part."""
        ...

    def flats(self) -> Iterator[Tensor]:
        """Yield the flat tensors that the optimizer works on, each while its state is in memory and may be changed."""
        ...


def state_of(optimizer: Any) -> dict[Tensor, dict[str, Any]]:
    """Return the state of the optimizer within DeepSpeed's, by flat tensor."""
    return optimizer.optimizer.state


def steps_taken(optimizer: Any) -> int:
    """Return how many steps the optimizer has taken; some count per tensor, some per group."""
    counts = [*state_of(optimizer).values(), *optimizer.optimizer.param_groups]
    return max((int(each["step"]) for each in counts if "step" in each), default=0)


def moments_of(optimizer: Any) -> list[str]:
    """Return the names of the moments that the optimizer has made so far."""
    states = state_of(optimizer).values()
    return sorted(
        {name for state in states for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
    )


def make_moments(optimizer: Any, fragments: Fragments, steps: int, moments: Iterable[str]) -> None:
    """Let the optimizer have taken `steps`, with moments that are still zero."""
    moments = list(moments)
    for flat in fragments.flats():
        step = torch.tensor(float(steps), device=flat.device)
        made = {moment: torch.zeros_like(flat, requires_grad=False) for moment in moments}
        state_of(optimizer)[flat] = {"step": step, **made}


class FlatGroups:
    """Slices at stages 1 and 2."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self.parameters = optimizer, parameters

    def interval(self, name: str) -> Interval:
        """Return which elements of a parameter lie in this rank's part of its group."""
        mapping = self._mapping(name)
        if mapping is None:
            return (0, 0)
        address = mapping.lp_fragment_address
        return (address.start, address.start + address.numel)

    def pieces(self, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's slice: the live one, or nothing where this rank has none of it."""
        flats = list(self.flats())
        for name in self.parameters:
            mapping = self._mapping(name)
            if mapping is None:
                yield name, flats[0].detach().new_empty(0)
                continue
            flat, address = flats[mapping.param_group_index], mapping.hp_fragment_address
            source = state_of(self.optimizer)[flat][of] if of else flat.detach()
            yield name, source.narrow(0, address.start, address.numel)

    @torch.no_grad()
    def rewrite(self, change: ShardUpdate, of: str = "") -> None:
        """Let `change` write into every slice; then gather the working weights from the masters of all ranks."""
        for name, piece in self.pieces(of):
            change(name, piece)
        if not of:
            self.optimizer.update_lp_params()

    def flats(self) -> Iterator[Tensor]:
        """Yield this rank's part of each parameter group."""
        for group in self.optimizer.optimizer.param_groups:
            yield group["params"][0]

    def _mapping(self, name: str) -> Any:
        return self.parameters[name]._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]


class Partitions:
    """Slices at stage 3, in sub-groups, each of which may lie on disk."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter], rank: int) -> None:
        self.optimizer, self.rank = optimizer, rank
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.intervals = {name: self._interval(parameter) for name, parameter in parameters.items()}

    def _interval(self, parameter: Any) -> Interval:
        share = parameter.partition_numel()
        return (min(self.rank * share, parameter.ds_numel), min((self.rank + 1) * share, parameter.ds_numel))

    def interval(self, name: str) -> Interval:
        """Return which elements of a parameter this rank has, without the padding."""
        return self.intervals[name]

    def pieces(self, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's slice; sub-groups that lie on disk are fetched one after the other."""
        for number in range(len(self.optimizer.fp16_groups)):
            with self._resident(number, changed=False):
                yield from self._pieces_of(number, of)

    @torch.no_grad()
    def rewrite(self, change: ShardUpdate, of: str = "") -> None:
        """Let `change` write into every slice; the working slices follow, and what all ranks keep whole."""
        if not of:
            self.optimizer.empty_partition_cache()
        for number in range(len(self.optimizer.fp16_groups)):
            with self._resident(number, changed=True):
                for name, piece in self._pieces_of(number, of):
                    change(name, piece)
                if not of:
                    self.optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if not of and (persistent := self.optimizer.persistent_parameters):
            persistent[0].all_gather(persistent)

    def flats(self) -> Iterator[Tensor]:
        """Yield this rank's part of each sub-group."""
        for number, flat in enumerate(self.optimizer.fp32_partitioned_groups_flat):
            with self._resident(number, changed=True):
                yield flat

    def _pieces_of(self, number: int, of: str) -> Iterator[tuple[str, Tensor]]:
        flat = self.optimizer.fp32_partitioned_groups_flat[number]
        source = state_of(self.optimizer)[flat][of] if of else flat.detach()
        for parameter in self.optimizer.fp16_groups[number]:
            _, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            name = self.names[id(parameter)]
            first, end = self.intervals[name]
            yield name, source.narrow(0, offset, end - first)

    @contextmanager
    def _resident(self, number: int, changed: bool) -> Iterator[None]:
        """Have a sub-group in memory for a while, and write it to disk again if it was changed."""
        optimizer = self.optimizer
        if not optimizer._swappable_optimizer_subgroup(number):
            yield
            return
        optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            if changed:
                optimizer._optimizer_states_and_gradient_swap_out(number)
            else:
                optimizer._release_swap_buffers(number)
