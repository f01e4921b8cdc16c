"""Per-rank context: settings, mesh, report, stop request."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.settings import Loaded, Settings
from simpletuner.system.processes.run_status import StatusWriter
from simpletuner.system.processes.signals import StopRequest


@dataclass(frozen=True)
class Session:
    """Context of one rank of a run."""

    loaded: Loaded
    mesh: Mesh
    report: Report
    stop: StopRequest
    background: ExitStack | None = None
    """Background work of the run, stopped when the rank ends."""
    status: StatusWriter = field(default_factory=StatusWriter)

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @property
    def world(self) -> World:
        return self.mesh.world

    def restarted(self) -> Session:
        # Barriers and jobs in the store, known by name, count from 0 again.
        world = replace(self.world, store=dist.PrefixStore("restarted", self.world.store))
        return replace(self, mesh=replace(self.mesh, world=world))
