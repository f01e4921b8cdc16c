"""Read and write the float32 weights and optimizer moments that DeepSpeed keeps on this rank.

DeepSpeed wraps our optimizer in one of three of its own (0.19.8, `DeepSpeedEngine._configure_optimizer`):

- stages 1 and 2: `DeepSpeedZeroOptimizer` (runtime/zero/stage_1_and_2.py)
- stage 1 in bf16 with float32 gradient accumulation: `BF16_Optimizer` (runtime/bf16_optimizer.py)
- stage 3: `DeepSpeedZeroOptimizer_Stage3` (runtime/zero/stage3.py)

The first two flatten each parameter group into one buffer and give every rank an equal range of it, so a
parameter may be on one rank, on several, or not on this rank at all. Stage 3 gives every rank an equal range
of each parameter, padded at the end, packs those ranges into sub-groups, and may keep sub-groups on disk.

The attributes used here are internal to DeepSpeed. `simpletuner/deepspeed/__init__.py` lists them with the
version they were checked with; tests/end_to_end/test_zero.py fails when their behaviour changes.

Convert between DeepSpeed's optimizer partitions and the row shards that checkpoints hold.

An optimizer partition is any contiguous range of a flattened parameter, and may be empty. A row shard is what
FSDP2 and checkpoints use: a DTensor sharded on dim 0. Both cut a flattened parameter into one contiguous
range per rank, in rank order, so a single all-to-all per parameter converts one into the other bit for bit,
and no rank holds a whole parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.optimizer_state import new_moments
from simpletuner.parallel.torch_engine import ShardUpdate


class ElementRange(NamedTuple):
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start

    def count_shared(self, other: ElementRange) -> int:
        return max(0, min(self.end, other.end) - max(self.start, other.start))


def row_ranges(shape: Sequence[int], num_ranks: int) -> list[ElementRange]:
    """Each rank's range of dim 0, cut as `torch.chunk` does; the last ranks may have no rows."""
    rows, row_numel = shape[0], prod(shape[1:])
    rows_per_rank = -(-rows // num_ranks)
    edges = [min(rank * rows_per_rank, rows) * row_numel for rank in range(num_ranks + 1)]
    return [ElementRange(start, end) for start, end in pairwise(edges)]


def exchange(elements: Tensor, have: Sequence[ElementRange], want: Sequence[ElementRange], rank: int) -> Tensor:
    """Collective: return the elements in `want[rank]` (1-D), given those in `have[rank]` (1-D).

    `have` and `want` list the range of every rank.
    """
    received = elements.new_empty(want[rank].numel)
    if len(have) == 1:
        return received.copy_(elements)
    send_sizes = [have[rank].count_shared(each) for each in want]
    receive_sizes = [want[rank].count_shared(each) for each in have]
    dist.all_to_all_single(received, elements.contiguous(), receive_sizes, send_sizes)
    return received


class RowShards:
    """Makes and converts row shards of parameters, given the shapes of the whole parameters by name."""

    def __init__(self, shapes: Mapping[str, torch.Size], mesh: Mesh) -> None:
        self.shapes, self.mesh, self.num_ranks, self.rank = shapes, mesh, mesh.world.size, mesh.world.rank
        self.ranges = {name: row_ranges(shape, self.num_ranks) for name, shape in shapes.items()}

    def empty(self, name: str, device: torch.device) -> DTensor:
        """Allocate this rank's rows (r, ...) in float32; r may be 0."""
        return self.as_dtensor(name, torch.empty(self.ranges[name][self.rank].numel, device=device))

    def as_dtensor(self, name: str, elements: Tensor) -> DTensor:
        """View this rank's elements (1-D) as its rows (r, ...) of a DTensor, without a copy."""
        shape, mesh = self.shapes[name], self.mesh.shard_mesh(elements.device.type)
        stride = torch.empty(shape, device="meta").stride()
        rows = elements.view(-1, *shape[1:])
        # run_check would compare shapes over all ranks, per parameter, and refuse ranks that have no rows
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def gather(self, name: str, rows: DTensor, device: torch.device) -> Tensor:
        """Collective: return the whole parameter on a device."""
        max_numel, shape = self.ranges[name][0].numel, self.shapes[name]
        local = rows.to_local().flatten()
        padded = torch.zeros(max_numel, device=device)  # all_gather wants equal sizes; the last ranks have fewer rows
        padded[: local.numel()] = local
        gathered = padded.new_empty(self.num_ranks * max_numel)
        dist.all_gather(list(gathered.chunk(self.num_ranks)), padded)
        return gathered[: shape.numel()].view(shape)

    def from_partition(self, name: str, partition: Tensor, have: Sequence[ElementRange]) -> DTensor:
        """Collective: convert this rank's partition (1-D) to rows; `have` lists all ranks' partitions."""
        return self.as_dtensor(name, exchange(partition, have, self.ranges[name], self.rank))

    def to_partition(self, name: str, rows: DTensor, want: Sequence[ElementRange]) -> Tensor:
        """Collective: convert this rank's rows to its partition (1-D); `want` lists all ranks' partitions."""
        return exchange(rows.to_local().flatten(), self.ranges[name], want, self.rank)


class OptimizerPartitions(Protocol):
    """This rank's float32 partitions of all trainable parameters, and of the optimizer's moments.

    `moment` names one of the optimizer's moments (`exp_avg`, ...); None means the float32 weights themselves.
    """

    def element_range(self, name: str) -> ElementRange: ...

    def local_shards(
        self, moment: str | None = None, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's partition (1-D, may be empty), in the same order on all ranks.

        `names` are the parameters that have the moment; by default all do. A partition is valid only until
        the next one is requested: its sub-group may be swapped out again.
        """
        ...

    def update_shards(self, fn: ShardUpdate, moment: str | None = None, names: Collection[str] | None = None) -> None:
        """Collective: call `fn(name, partition)` on what `local_shards` yields; it writes in place.

        After an update of the float32 weights, the weights that compute are refreshed from them.
        """
        ...

    def flat_buffers(self) -> Iterator[Tensor]:
        """Yield the flat float32 parameters (1-D, of total length N_rank) that our optimizer steps.

        Each is valid, with its optimizer state, until the next one is requested.
        """
        ...

    def places(self) -> Iterator[tuple[str, Tensor | None, int]]:
        """Yield every parameter's name, the flat buffer with its partition, and where that begins there.

        The order is the same on all ranks. Without an element of the parameter, this rank has no buffer.
        """
        ...


class FlatBufferPartitions:
    """Partitions at stages 1 and 2: ranges of one flat buffer per parameter group."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self.parameters = optimizer, parameters

    def element_range(self, name: str) -> ElementRange:
        mapping = self._mapping(name)
        if mapping is None:
            return ElementRange(0, 0)
        address = mapping.lp_fragment_address
        return ElementRange(address.start, address.start + address.numel)

    def local_shards(
        self, moment: str | None = None, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        empty = next(self.flat_buffers()).detach().new_empty(0)
        for name, flat, start in self.places():
            if names is not None and name not in names:
                continue
            if flat is None:
                yield name, empty
                continue
            source = flat.detach() if moment is None else optimizer_states(self.optimizer)[flat][moment]
            yield name, source.narrow(0, start, self.element_range(name).numel)

    def places(self) -> Iterator[tuple[str, Tensor | None, int]]:
        flat_buffers = list(self.flat_buffers())
        for name in self.parameters:
            mapping = self._mapping(name)
            if mapping is None:
                yield name, None, 0
            else:
                yield name, flat_buffers[mapping.param_group_index], mapping.hp_fragment_address.start

    @torch.no_grad()
    def update_shards(self, fn: ShardUpdate, moment: str | None = None, names: Collection[str] | None = None) -> None:
        for name, shard in self.local_shards(moment, names):
            fn(name, shard)
        if moment is None:
            self.optimizer.update_lp_params()  # casts to the compute dtype and all-gathers

    def flat_buffers(self) -> Iterator[Tensor]:
        for group in self.optimizer.optimizer.param_groups:
            yield group["params"][0]

    def _mapping(self, name: str) -> Any:
        # Set by utils/mixed_precision_linkage.py, link_hp_params; None where this rank has no element of the
        # parameter. It says where the partition is in the parameter (lp_...) and in the flat buffer (hp_...).
        return self.parameters[name]._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]


class SubGroupPartitions:
    """Partitions at stage 3: ranges of sub-groups, each of which may be on disk."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter], rank: int) -> None:
        self.optimizer, self.rank = optimizer, rank
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.ranges = {name: self._range_of(parameter) for name, parameter in parameters.items()}

    def _range_of(self, parameter: Any) -> ElementRange:
        # Every rank's partition has partition_numel elements; the last ones are padded past ds_numel.
        start = self.rank * parameter.partition_numel()
        end = start + parameter.partition_numel()
        return ElementRange(min(start, parameter.ds_numel), min(end, parameter.ds_numel))

    def element_range(self, name: str) -> ElementRange:
        return self.ranges[name]

    def local_shards(
        self, moment: str | None = None, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for number in range(len(self.optimizer.fp16_groups)):
            with self._in_memory(number, write_back=False):
                yield from self._shards_in(number, moment, names)

    def places(self) -> Iterator[tuple[str, Tensor | None, int]]:
        for number, flat in enumerate(self.optimizer.fp32_partitioned_groups_flat):
            for name, offset in self._offsets_in(number):
                yield name, flat, offset

    @torch.no_grad()
    def update_shards(self, fn: ShardUpdate, moment: str | None = None, names: Collection[str] | None = None) -> None:
        if moment is None:
            # Drops gathered copies of the old weights, which validation or a forward pass may have left.
            self.optimizer.empty_partition_cache()
        for number in range(len(self.optimizer.fp16_groups)):
            with self._in_memory(number, write_back=True):
                for name, shard in self._shards_in(number, moment, names):
                    fn(name, shard)
                if moment is None:
                    self.optimizer._reassign_or_swap_out_partitioned_parameters(number)
        # Small parameters stay whole on every rank (stage3_param_persistence_threshold), so they are gathered
        # again, as `DeepSpeedZeroOptimizer_Stage3._post_step` does after each step.
        if moment is None and (persistent := self.optimizer.persistent_parameters):
            persistent[0].all_gather(persistent)

    def flat_buffers(self) -> Iterator[Tensor]:
        for number, flat in enumerate(self.optimizer.fp32_partitioned_groups_flat):
            with self._in_memory(number, write_back=True):
                yield flat

    def _shards_in(
        self, number: int, moment: str | None, names: Collection[str] | None
    ) -> Iterator[tuple[str, Tensor]]:
        flat = self.optimizer.fp32_partitioned_groups_flat[number]
        for name, offset in self._offsets_in(number):
            if names is None or name in names:
                source = flat.detach() if moment is None else optimizer_states(self.optimizer)[flat][moment]
                yield name, source.narrow(0, offset, self.ranges[name].numel)

    def _offsets_in(self, number: int) -> Iterator[tuple[str, int]]:
        for parameter in self.optimizer.fp16_groups[number]:  # "fp16" by name only: whatever dtype computes
            _, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            yield self.names[id(parameter)], offset

    @contextmanager
    def _in_memory(self, number: int, write_back: bool) -> Iterator[None]:
        """Read a sub-group and its optimizer state from disk if they are there; perhaps write them back."""
        optimizer = self.optimizer
        if not optimizer._swappable_optimizer_subgroup(number):
            yield
            return
        optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            if write_back:
                optimizer._optimizer_states_and_gradient_swap_out(number)
            else:
                optimizer._release_swap_buffers(number)


def optimizer_states(optimizer: Any) -> dict[Tensor, dict[str, Any]]:
    """Return the state of our optimizer, which DeepSpeed's wraps, by flat buffer."""
    return optimizer.optimizer.state


def count_steps(optimizer: Any) -> int:
    # torch's optimizers count per tensor, DeepSpeed's FusedAdam per parameter group.
    entries = [*optimizer_states(optimizer).values(), *optimizer.optimizer.param_groups]
    return max((int(entry["step"]) for entry in entries if "step" in entry), default=0)


def moment_names(optimizer: object) -> list[str]:
    """Return the names of the moments that our optimizer has created so far."""
    states = optimizer_states(optimizer).values()
    return sorted(
        {name for state in states for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
    )


def create_moments(optimizer: Any, partitions: OptimizerPartitions, steps: int) -> None:
    """Give our optimizer the state that it has after `steps` steps, with all moments zero."""
    for flat in partitions.flat_buffers():
        step = torch.tensor(float(steps), device=flat.device)
        zeros = {moment: make() for moment, make in new_moments(optimizer.optimizer, flat).items()}
        optimizer_states(optimizer)[flat] = {"step": step, **zeros}
