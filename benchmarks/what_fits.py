"""Published models in full and by LoRA on cards of 24, 48 and 80 GB: what fits, as `simpletuner plan` counts it.

    python benchmarks/what_fits.py [full|lora] [FAMILY[:FLAVOUR]...]

Prints the tables of docs/what-fits.md. Each cell is the fastest of the settings that fit, as `plan --auto` finds them,
with one sample of 1024x1024 px per GPU; its seconds per step are predicted, not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import presets
from simpletuner.parallel.devices.devices import DEVICES
from simpletuner.parallel.devices.memory import MemoryBudget
from simpletuner.report import Report
from simpletuner.settings import Loaded, load
from simpletuner.tools.plan.estimate import RunPlan, estimate_run
from simpletuner.tools.plan.inputs import count_shapes, opened_family
from simpletuner.tools.plan.planner import flops_per_sample
from simpletuner.tools.plan.search import propose
from simpletuner.training.auto.recompute import USABLE
from simpletuner.training.auto.workload import Workload

MODELS = (
    "sdxl:base-1.0", "sd3:medium", "sd3:large", "pixart_sigma", "sana", "auraflow", "lumina2", "z_image", "chroma",
    "flux:dev", "ltxvideo", "wan:t2v-480p-14b-2.1", "qwen_image", "flux2:dev",
)  # fmt: skip
CARDS = {"RTX-4090": "24 GB", "RTX-6000-Ada": "48 GB", "H100": "80 GB"}
COUNTS = (1, 4, 8)
TYPES = ("full", "lora")
PRECISIONS = ("no_change", "int8", "nf4")
"""Of the base below a LoRA, in the order of what costs least quality."""


@dataclass(frozen=True)
class Model:
    """A published model; workloads are counted once for each precision of its base."""

    name: str
    model_type: str

    def rows(self) -> list[str]:
        cells = {(card, count): "" for card in CARDS for count in COUNTS}
        for precision in PRECISIONS if self.model_type == "lora" else PRECISIONS[:1]:
            missing = [place for place, cell in cells.items() if not cell]
            if missing:
                cells |= dict(self.cells(precision, missing))
        return [cell or "-" for cell in cells.values()]

    def flags(self, precision: str, count: int) -> dict[str, Any]:
        family, _, flavour = self.name.partition(":")
        flags = {"model_family": family, "model_type": self.model_type, "train_batch_size": 1, "num_processes": count}
        flags |= {"model_flavour": flavour} if flavour else {}
        return flags | ({"base_model_precision": precision} if self.model_type == "lora" else {})

    def cells(self, precision: str, places: list[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], str]]:
        quiet = Report(quiet=True)
        first = load(self.flags(precision, 1), complete=False)
        with opened_family(first.settings, quiet) as family:
            shapes = count_shapes(first, quiet)
            workload, flops = Workload(family, shapes.largest), flops_per_sample(family, shapes.largest)
            for card, count in places:
                flags, device = self.flags(precision, count), DEVICES[card]

                def with_settings(values: Mapping[str, Any], flags: dict[str, Any] = flags) -> Loaded:
                    return load({**flags, **values}, complete=False)

                def estimate(loaded: Loaded, card: str = card) -> RunPlan:
                    return estimate_run(loaded.settings, workload, shapes, DEVICES[card], flops)

                budget = MemoryBudget(device.memory_bytes, None, 1 - USABLE)
                try:
                    plan, _, _ = propose(with_settings({}), with_settings, estimate, budget)
                except SettingsError:  # nothing fits
                    continue
                yield (card, count), described(plan, precision)


def described(plan: RunPlan, precision: str) -> str:
    assert plan.step_seconds is not None
    notes = [] if precision == "no_change" else [precision]
    notes += ["streamed"] if plan.settings.parallel.fsdp_offload_params else []
    layout = plan.settings.optimizer.state_layout
    notes += [layout] if layout != "fp32" else []
    return " ".join([f"{plan.step_seconds:.2g} s", *notes])


def main(names: list[str]) -> None:
    """Print a table for full fine-tuning, and one for LoRA."""
    head = [f"{size} x {count}" if count > 1 else size for size in CARDS.values() for count in COUNTS]
    types = [name for name in names if name in TYPES] or TYPES
    names = [name for name in names if name not in TYPES]
    for model_type in types:
        print(f"\n| {model_type} | {' | '.join(head)} |\n|---|{'---|' * len(head)}", flush=True)
        for name in names or MODELS:
            if model_type == "lora" and not presets()[name.partition(":")[0]].loads_lora:
                continue
            print(f"| `{name}` | {' | '.join(Model(name, model_type).rows())} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
