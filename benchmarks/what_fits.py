"""Published models in full and by LoRA on cards of 24, 48 and 80 GB: what fits, as `simpletuner plan` counts it.

    python benchmarks/what_fits.py [full|lora|readme] [FAMILY[:FLAVOUR]...]

Prints the tables of docs/what-fits.md, or with `readme` that of README.md, which has the memory in place of how. Each
cell is the fastest of the settings that fit, as `plan --auto` finds them, with one sample of 1024x1024 px per GPU; its
seconds per step are predicted, not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from simpletuner.counting.step_memory import Workload, estimate_without_step
from simpletuner.errors import SettingsError
from simpletuner.models.catalog.registry import presets
from simpletuner.parallel.devices import DEVICES, Device, MemoryBudget
from simpletuner.report import Report
from simpletuner.settings import Loaded, load
from simpletuner.tools.plan.estimate import RunPlan, SampleShapes, count_shapes, estimate_run, opened_family
from simpletuner.tools.plan.planner import flops_per_sample
from simpletuner.tools.plan.search import Search, propose
from simpletuner.training.auto import USABLE

MODELS = (
    "sdxl:base-1.0", "sd3:medium", "sd3:large", "pixart_sigma", "sana", "auraflow", "lumina2", "z_image", "chroma",
    "flux:dev", "ltxvideo", "wan:t2v-480p-14b-2.1", "qwen_image", "flux2:dev",
)  # fmt: skip
CARDS = {"RTX-4090": "24 GB", "RTX-6000-Ada": "48 GB", "H100": "80 GB"}
COUNTS = (1, 4, 8)
TYPES = ("full", "lora")
README_MODELS = {
    "sdxl:base-1.0": "SDXL",
    "z_image": "Z-Image",
    "flux:dev": "FLUX.1-dev",
    "wan:t2v-480p-14b-2.1": "Wan 2.1 14B, a frame",
}
README_PLACES = {"lora": (("RTX-4090", 1),), "full": (("RTX-4090", 1), ("H100", 8))}


@dataclass(frozen=True)
class Model:
    """A published model, whose workload is counted once."""

    name: str
    model_type: str

    def plans(self, places: Iterable[tuple[str, int]]) -> list[RunPlan | None]:
        """Return the fastest plan that fits on each number of cards; None where nothing does."""
        quiet = Report(quiet=True)
        first = load(self.flags(1), complete=False)
        with opened_family(first.settings, quiet) as family:
            shapes = count_shapes(first, quiet)
            workload, flops = Workload(family, shapes.largest), flops_per_sample(family, shapes.largest)
            return [self.plan(workload, shapes, flops, DEVICES[card], count) for card, count in places]

    def flags(self, count: int) -> dict[str, Any]:
        family, _, flavour = self.name.partition(":")
        flags = {"model_family": family, "model_type": self.model_type, "train_batch_size": 1, "num_processes": count}
        return flags | ({"model_flavour": flavour} if flavour else {})

    def plan(self, workload: Workload, shapes: SampleShapes, flops: int, device: Device, count: int) -> RunPlan | None:
        flags = self.flags(count)

        def with_settings(values: Mapping[str, Any]) -> Loaded:
            return load({**flags, **values}, complete=False)

        def estimate(loaded: Loaded) -> RunPlan:
            return estimate_run(loaded.settings, workload, shapes, device, flops)

        try:
            budget = MemoryBudget(device.memory_bytes, None, 1 - USABLE)
            search = Search(with_settings, estimate, partial(estimate_without_step, workload=workload), budget)
            return propose(with_settings({}), search, Report(quiet=True))[0]
        except SettingsError:  # nothing fits
            return None


def described(plan: RunPlan | None) -> str:
    if plan is None:
        return "-"
    assert plan.step_seconds is not None
    precision, layout = plan.settings.lora.base_model_precision, plan.settings.optimizer.state_layout
    notes = [] if precision == "no_change" else [precision]
    notes += ["streamed"] if plan.settings.parallel.fsdp_offload_params else []
    notes += [layout] if layout != "fp32" else []
    return " ".join([f"{plan.step_seconds:.2g} s", *notes])


def with_memory(plan: RunPlan | None) -> str:
    return f"{plan.peak_bytes / 2**30:.0f} GiB, {plan.step_seconds:.2g} s" if plan else "-"


def size_of(card: str, count: int) -> str:
    return f"{CARDS[card]} x {count}" if count > 1 else CARDS[card]


def main(names: list[str]) -> None:
    """Print a table for full fine-tuning, and one for LoRA; or that of README.md."""
    if names[:1] == ["readme"]:
        print_readme()
        return
    places = [(card, count) for card in CARDS for count in COUNTS]
    types = [name for name in names if name in TYPES] or TYPES
    names = [name for name in names if name not in TYPES]
    for model_type in types:
        print()
        print_head([model_type, *(size_of(*place) for place in places)])
        for name in names or MODELS:
            if model_type == "lora" and not presets()[name.partition(":")[0]].loads_lora:
                continue
            print_row([f"`{name}`", *map(described, Model(name, model_type).plans(places))])


def print_readme() -> None:
    kinds = {"lora": "LoRA", "full": "full"}
    print_head(
        ["", *(f"{kinds[kind]}, {size_of(*place)}" for kind, places in README_PLACES.items() for place in places)]
    )
    for name, title in README_MODELS.items():
        plans = (plan for kind, places in README_PLACES.items() for plan in Model(name, kind).plans(places))
        print_row([title, *map(with_memory, plans)])


def print_head(cells: Sequence[str]) -> None:
    print_row(cells)
    print("|" + "---|" * len(cells))


def print_row(cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
