"""What every phase of a rank's life is given: the settings, the other ranks, the reporter, and whether to stop."""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.parallel.world import World
from simpletuner.report import Report
from simpletuner.settings import Loaded, Settings
from simpletuner.system.signals import StopRequest


@dataclass(frozen=True)
class Session:
    """One rank of one run."""

    loaded: Loaded
    world: World
    report: Report
    stop: StopRequest

    @property
    def settings(self) -> Settings:
        """Return the settings of the run."""
        return self.loaded.settings
