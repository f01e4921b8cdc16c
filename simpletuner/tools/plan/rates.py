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
    """The cards that were measured, the most similar one first; empty where nothing was."""

    def __str__(self) -> str:
        return f"rates measured on {self.card}" if self.card else "assumed rates"


def rates_of(device: Device, measured: Path = MEASURED) -> Rates:
    """Return a device's rates, each of the most similar card that has it measured; else assumed."""
    known = tomllib.loads(measured.read_text(encoding="utf-8"))
    found, cards = dict[str, float](), list[str]()
    for card in sorted(known, key=lambda name: distance(DEVICES[name], device)):
        # An H100's PCIe is of the fifth generation, an RTX 4090's of the fourth.
        own = {name for name in known[card] if DEVICES[card] is device or name != "host_gb_per_second"} - found.keys()
        if own:
            found |= {name: known[card][name] for name in own}
            cards.append(card)
    return Rates(**found, card=" and ".join(cards))


def distance(one: Device, other: Device) -> float:
    pairs = ((one.peak_tflops, other.peak_tflops), (one.memory_gb_per_second, other.memory_gb_per_second))
    return sum(abs(math.log(ours / theirs)) for ours, theirs in pairs)
