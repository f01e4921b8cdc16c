"""Memory of what FSDP2 gathers and reduces, at each point of a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from simpletuner.models.analysis.step_trace import StepTrace
from simpletuner.parallel.devices.memory import FLOAT32_BYTES, compute_bytes, frozen_bytes
from simpletuner.parallel.fsdp2 import units_of
from simpletuner.parallel.model.blocks import recommended_blocks
from simpletuner.parallel.model.module_stats import count_parameters
from simpletuner.settings import Settings

FORMULA = "the root, two units, and gradients of one in float32, at the peak"


@dataclass(frozen=True)
class Units:
    """Parameters of FSDP2's units by path, and of the root, which has all others."""

    sizes: dict[str, int]
    root: int

    @classmethod
    def of(cls, model: nn.Module, settings: Settings) -> Units:
        paths, sizes, seen = {module: path for path, module in model.named_modules()}, {}, set[nn.Parameter]()
        for unit in units_of(model, recommended_blocks(model), settings.parallel):  # innermost first
            own = set(unit.parameters()) - seen
            sizes[paths[unit]] = sum(each.numel() for each in own)
            seen |= own
        return cls(sizes, count_parameters(model) - sum(sizes.values()))

    def of_name(self, name: str) -> str:
        """Return the unit of a parameter; empty for the root."""
        while name and name not in self.sizes:
            name = name.rpartition(".")[0]
        return name


@dataclass
class Backward:
    """State of a backward pass over units: bytes by unit, of gathered weights and of float32 gradients."""

    units: Units
    weight_bytes: float
    gradient_bytes: float
    """Of the gradient of a value in its own precision; 0 where most values have none."""
    reduced_bytes: float
    reshards: bool
    """True where units are freed after their forward pass, and gathered again for the backward pass."""
    present: str = ""
    previous: str = ""
    done: dict[str, float] = field(default_factory=dict)
    """Bytes of gradients that are not reduced yet."""

    def enter(self, unit: str) -> None:
        if unit and unit != self.present:
            self.previous, self.present = self.present, unit
            self.done.pop(self.previous, None)

    def held(self, following: str) -> float:
        sizes = self.units.sizes
        units = sizes.get(self.present, 0) + sizes.get(following, 0) if self.reshards else sum(sizes.values())
        gathered = self.units.root + units
        return self.weight_bytes * gathered + sum(self.done.values()) + self.reduced_bytes * sizes.get(self.previous, 0)


def gathered_points(settings: Settings, model: nn.Module, trace: StepTrace, numel: dict[str, int]) -> Iterator[float]:
    """Yield the bytes that FSDP2 adds at each of `trace.backward_points`: the root, the unit that computes and the next
    one, their gradients, and in float32 those of the unit before, which ranks are reducing.

    `numel` are the sizes of what is trained, by the names in the trace.
    """
    units, is_lora = Units.of(model, settings), settings.model.model_type == "lora"
    of = {name: units.of_name(name) for name in trace.released}
    order = [unit for unit in dict.fromkeys(of.values()) if unit]
    after = dict(pairwise(order))
    width = frozen_bytes(settings) if is_lora else compute_bytes(settings)
    gradients = (0, 0) if is_lora else (width, FLOAT32_BYTES)
    backward = Backward(units, width, *gradients, settings.parallel.fsdp_reshard_after_forward)
    for name in trace.released:
        backward.enter(of[name])
        following = after.get(backward.present, "") if backward.present else (order or [""])[0]
        yield backward.held(following)
        backward.done[of[name]] = backward.done.get(of[name], 0) + backward.gradient_bytes * numel[name]
    yield backward.held("")
