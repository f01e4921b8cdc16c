"""Share of a planned run's step that communication takes on the network that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner.parallel.devices.devices import Device
from simpletuner.parallel.devices.memory import MemoryBudget
from simpletuner.report import Report
from simpletuner.settings import Loaded
from simpletuner.tools.plan.planner import Planner
from simpletuner.tools.plan.timing import StepSeconds, communication_bytes


@dataclass(frozen=True)
class PlannedCommunication:
    """Prediction of what a rank sends in a step, and of its time at the measured bus bandwidth."""

    bytes_per_step: float
    seconds: float
    step: StepSeconds | None
    """Prediction of the step with that communication; None where the device is not known."""

    @property
    def share(self) -> float | None:
        """Communication over the whole step; most of it overlaps with computation."""
        return self.step and self.seconds / self.step.total

    @property
    def waited_seconds(self) -> float | None:
        """Part of a step in which nothing computes."""
        return self.step and self.step.total - replace(self.step, communication=0.0).total

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes_per_step": self.bytes_per_step,
            "communication_seconds": self.seconds,
            "step_seconds": self.step and self.step.total,
            "share": self.share,
            "waited_seconds": self.waited_seconds,
        }


def plan_communication(
    loaded: Loaded, flags: Mapping[str, Any], config: Path | None, device: Device | None, rate: float, report: Report
) -> PlannedCommunication:
    """Predict a step of the settings at a bus bandwidth. Raises SimpleTunerError for a model that cannot be planned."""
    budget = MemoryBudget(device and device.memory_bytes, None)
    plan = Planner(loaded, flags, config, device, budget, report).run(auto=False, measure=False).plan
    num_bytes = communication_bytes(plan.settings, plan.memory.inputs.num_parameters)
    step = plan.parts and replace(plan.parts, communication=num_bytes / rate)
    return PlannedCommunication(num_bytes, num_bytes / rate, step)
