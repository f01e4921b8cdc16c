"""Rates of each card, by the figures in the repository: what `simpletuner plan` reads in place of what it assumes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from gpu.records import Record, read_records

from simpletuner.parallel.devices import DEVICES, Device

FIGURES = Path(__file__).parents[1] / "figures"
HEAD = "# Made by `python benchmarks/gpu rates` from benchmarks/figures; without a card here all rates are assumed.\n"
BUSY = 0.9
"""A step in which the GPU is busy for less of the time waits for the host, which launches kernels."""


def rates_as_toml(folder: Path = FIGURES) -> str:
    """Return a table for each card that has figures, with the median of each rate."""
    text = HEAD
    for place in sorted(each for each in folder.iterdir() if each.is_dir()):
        found = defaultdict[str, list[float]](list)
        for name, value in measured_rates(DEVICES[place.name], list(read_records(sorted(place.glob("*.jsonl"))))):
            found[name].append(value)
        if found:
            lines = [f"{name} = {median(values):.4g}" for name, values in sorted(found.items())]
            text += "\n".join(["", f"[{place.name}]", *lines, ""])
    return text


def measured_rates(device: Device, records: Iterable[Record]) -> Iterator[tuple[str, float]]:
    """Yield rates by the names of `simpletuner.tools.plan.rates.Rates`."""
    steps: dict[str, Record] = {}
    for record in records:
        what = record.get("what", "")
        if what == "rates":
            yield "products", record["for longer, TFLOP/s"] / device.peak_tflops
            yield "traffic", record["copy, TB/s"] * 1000 / device.memory_gb_per_second
            yield "host_gb_per_second", min(record["pinned to device, GB/s"], record["device to pinned, GB/s"])
        elif what == "attention auto" and "error" not in record:
            # a backward pass has 2.5 times the FLOPs
            seconds = 1 / record["forward, TFLOP/s"] + 2.5 / record["backward, TFLOP/s"]
            yield "attention", 3.5 / seconds / device.peak_tflops
        elif what.startswith("link of ") and "error" not in record:
            yield "link", min(record["all_gather"], record["reduce_scatter"]) / device.link_gb_per_second
        elif record.get("kind") == "measured" and "flags" in record:
            steps[record["step"]] = record
        elif record.get("kind") == "trace" and record["step"] in steps:
            step = steps[record["step"]]  # whose seconds count: tracing took SDXL's LoKr on an H100 from 0.83 to 0.98 s
            if record["busy"] < BUSY * step["s/step"]:
                is_compiled = step["flags"].get("dynamo_backend") == "inductor"
                yield "compiled_" * is_compiled + "launch_seconds", step["s/step"] / record["launches"]
