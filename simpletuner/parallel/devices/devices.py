"""Known GPUs: what they compute, hold and move at most, by their vendors' data sheets. No torch.

Arithmetic is dense bf16 with float32 accumulation; where a sheet gives numbers with sparsity, half of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from simpletuner.errors import SettingsError
from simpletuner.settings.declared.errors import nearest

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """`pattern` is a regular expression of the whole name that the driver gives; the same name may mean a slower card
    (H100 PCIe, H100 NVL, H200 NVL), which is not that device."""

    pattern: str
    peak_tflops: float
    memory_gib: float
    """Memory available to programs, as nvidia-smi shows it."""
    memory_gb_per_second: float
    link_gb_per_second: float
    """To the other GPUs of the machine, in one direction: NVLink, or PCIe where there is none."""

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)


# By the names that `simpletuner plan --gpu` takes.
# Links: 32 GB/s are PCIe 4.0 x16, and 448 the seven links of an MI300X, 64 each.
DEVICES = {
    "H100": Device(r"NVIDIA H100 \d+GB HBM3", 989.5, 79.6, 3350, 450),
    "H200": Device(r"NVIDIA H200", 989.5, 139.8, 4800, 450),
    "B200": Device(r"NVIDIA B200", 2250.0, 179.1, 8000, 900),
    "A100-80GB": Device(r"NVIDIA A100.*80GB", 312.0, 79.3, 2039, 300),
    "A100-40GB": Device(r"NVIDIA A100.*40GB", 312.0, 39.4, 1555, 300),
    "L40S": Device(r"NVIDIA L40S", 362.0, 45.0, 864, 32),
    "RTX-4090": Device(r"NVIDIA GeForce RTX 4090", 165.2, 24.0, 1008, 32),
    "RTX-6000-Ada": Device(r"NVIDIA RTX 6000 Ada Generation", 364.0, 48.0, 960, 32),
    "MI300X": Device(r"AMD Instinct MI300X.*", 1307.0, 191.5, 5300, 448),
}


def device_by_driver_name(name: str) -> Device | None:
    """Return the device whose driver gives this name; None for one that is not in the table."""
    return next((device for device in DEVICES.values() if re.fullmatch(device.pattern, name)), None)


def device_by_name(name: str, otherwise: str = "") -> Device:
    """Return the device of a typed name, in any case. Raises SettingsError that names the nearest one.

    `otherwise` says what to do for a device that is not in the table.
    """
    known = {each.lower().replace("-", ""): each for each in DEVICES}
    if found := known.get(re.sub(r"[\s_-]", "", name.lower())):
        return DEVICES[found]
    raise SettingsError(
        f"--gpu = {name}: not in the table{nearest(name.upper(), DEVICES)}",
        "; ".join(filter(None, [f"known are {', '.join(DEVICES)}", otherwise])),
    )
