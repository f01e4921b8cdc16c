"""Shares of a card's data sheet that training steps reach: by figures in the repository, else assumed.

`rates.toml` is what `python benchmarks/gpu rates` prints of benchmarks/figures, which is not installed.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from simpletuner.parallel.devices import DEVICES, Device

MEASURED = Path(__file__).with_name("rates.toml")


@dataclass(frozen=True)
class Rates:
    """Rates as assumed from measurements of others on H100 and H200 (docs/plan.md), or as measured."""

    products: float = 0.71
    attention: float = 0.55
    """Shares of a device's peak."""
    traffic: float = 0.8
    """Share of its memory's rate."""
    link: float = 0.7
    host_gb_per_second: float = 25.0
    """Of PCIe to a GPU, and of the host's memory for one rank's optimizer."""
    launch_seconds: float = 6e-6
    """Of one kernel, on the host, with Python's part of it: what small samples cost at least."""
    compiled_launch_seconds: float = 6e-6
    card: str = ""
    """The card that was measured; empty where nothing was."""

    def __str__(self) -> str:
        return f"rates measured on {self.card}" if self.card else "assumed rates"


def rates_of(device: Device, measured: Path = MEASURED) -> Rates:
    """Return the rates of a device, or of the most similar one that has figures; what these lack is assumed."""
    known = tomllib.loads(measured.read_text(encoding="utf-8"))
    if not known:
        return Rates()
    card = min(known, key=lambda name: distance(DEVICES[name], device))
    found = known[card]
    if (
        DEVICES[card] is not device
    ):  # whose PCIe may be slower: an H100's is of the fifth generation, an RTX 4090's fourth
        found = {name: rate for name, rate in found.items() if name != "host_gb_per_second"}
    return Rates(**found, card=card)


def distance(one: Device, other: Device) -> float:
    pairs = ((one.peak_tflops, other.peak_tflops), (one.memory_gb_per_second, other.memory_gb_per_second))
    return sum(abs(math.log(ours / theirs)) for ours, theirs in pairs)
