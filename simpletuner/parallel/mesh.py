"""The axes along which ranks share work: dp_replicate x dp_shard x cp, the last one varying fastest.

Ranks that differ only in `cp` (context parallel) hold parts of the same sequences, so they see the same
samples; data is split over the other two axes. Parameters are sharded over dp_shard x cp, and replicated over
dp_replicate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from simpletuner.parallel.world import World
from simpletuner.settings.declared.sections import Settings

SHARDS = "dp_shard_cp"
"""The dimension of a DeviceMesh over which parameters are sharded."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes over all ranks of `world`, and this rank's place in the data."""

    world: World
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    shard_meshes: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        assert self.dp_replicate * self.dp_shard * self.cp == self.world.size, self

    @property
    def data_size(self) -> int:
        """Number of slices into which each global batch is cut."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        """Slice of this rank in each global batch."""
        # Ranks of a context-parallel group are neighbours, mostly on one machine, and see the same samples.
        return self.world.rank // self.cp

    @property
    def cp_rank(self) -> int:
        """Part of this rank in its group's sequences."""
        return self.world.rank % self.cp

    def cp_group(self) -> dist.ProcessGroup:
        """Ranks that hold parts of the same sequences as this one. Collective, creates communicators."""
        group, _ = dist.new_subgroups(self.cp)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def data_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of a small tensor over the ranks. Collective.

        Ranks of one `cp` group hold equal values, so the mean over all ranks is the mean over the data.
        """
        return self.begin_data_mean(values)()

    def begin_data_mean(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin the mean of a small tensor over the ranks, and return a function that waits for the result.
        Collective."""
        return self.world.begin_mean(values)

    def shard_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh over which parameters are sharded. Collective at the first call for a device type.

        It is 1-D, or (dp_replicate, dp_shard x cp) for several sharded copies. There is one per device type,
        since EMA and optimizer state may be offloaded: DTensors on the CPU need a gloo mesh, and on a GPU an
        NCCL mesh.
        """
        if device_type not in self.shard_meshes:
            sizes, names = (self.dp_shard * self.cp,), (SHARDS,)
            if self.dp_replicate > 1:
                sizes, names = (self.dp_replicate, *sizes), ("dp_replicate", *names)
            self.shard_meshes[device_type] = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        return self.shard_meshes[device_type]

    def sum_over_shards(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor, in place, over the ranks that shard one copy of the parameters. Collective."""
        dist.all_reduce(value, group=self.shard_mesh(value.device.type).get_group(SHARDS))
        return value


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The ranks over which a DTensor is sharded; None for a tensor that is whole on each of them."""
    # Asked of the tensor: importing DTensor takes 0.4 CPU s, which a run without shards saves.
    return getattr(tensor, "device_mesh", None)


def build_mesh(settings: Settings, world: World) -> Mesh:
    """Return the mesh that the settings ask for: FSDP2 and ZeRO shard over all ranks, else all ranks are
    replicas.

    Under FSDP2 there may be several copies, each sharded over neighbouring ranks of one machine.
    """
    parallel = settings.parallel
    if parallel.fsdp_enable:
        copies, cp = parallel.dp_replicate_size, parallel.context_parallel_size
        return Mesh(world, dp_replicate=copies, dp_shard=world.size // (copies * cp), cp=cp)
    return Mesh(world, dp_shard=world.size) if parallel.zero_stage is not None else Mesh(world, dp_replicate=world.size)
