"""What one node was asked to check; clock, locks and the list of mounts can be given, to see what they do to it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from simpletuner.tools.nfs.footprint import Footprint
from simpletuner.tools.nfs.mounts import MOUNTINFO


@dataclass(frozen=True)
class Node:
    """One of the nodes: which, where, how long it waits; `address` and `port` are where the run will meet."""

    path: Path
    rank: int = 0
    nodes: int = 1
    timeout_seconds: float = 60.0
    size_mib: int | None = None
    address: str = ""
    port: int = 29500
    footprint: Footprint | None = None
    clock: Callable[[], float] = time.time
    flock: Callable[[int, int], None] = fcntl.flock
    mountinfo: Path = MOUNTINFO

    @property
    def is_alone(self) -> bool:
        """Return whether there are no other nodes."""
        return self.nodes == 1

    @property
    def others(self) -> list[int]:
        """Return the ranks of the other nodes."""
        return [rank for rank in range(self.nodes) if rank != self.rank]

    def command_of(self, rank: int) -> str:
        """Return what to type on another node."""
        return f"simpletuner nfs check --path={self.path} --nodes={self.nodes} --node-rank={rank}"
