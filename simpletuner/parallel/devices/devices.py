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
# Links: 16 GB/s are PCIe 3.0 x16 or 4.0 x8, 32 PCIe 4.0 x16, 64 PCIe 5.0 x16, and 448 the seven links of an MI300X.
# GeForce: NVIDIA's whitepapers of GA102 (appendix A), Ada and RTX Blackwell, "Peak FP16 Tensor TFLOPS with FP32
# Accumulate" without sparsity, which is 512 per SM and clock at boost, and so computed for the 3060, 4060 Ti and 4070s.
# Of the 3060, 3080 and 4060 Ti there are others of the same name with 8, 12 and 8 GB: `--gpu_memory` says so.
DEVICES = {
    "H100": Device(r"NVIDIA H100 \d+GB HBM3", 989.5, 79.6, 3350, 450),
    "H200": Device(r"NVIDIA H200", 989.5, 139.8, 4800, 450),
    "B200": Device(r"NVIDIA B200", 2250.0, 179.1, 8000, 900),
    "A100-80GB": Device(r"NVIDIA A100.*80GB", 312.0, 79.3, 2039, 300),
    "A100-40GB": Device(r"NVIDIA A100.*40GB", 312.0, 39.4, 1555, 300),
    # Data sheets of NVIDIA: half of the tensor numbers with sparsity. A T4 has no bf16: its number is of fp16.
    "L40S": Device(r"NVIDIA L40S", 362.0, 45.0, 864, 32),
    "L4": Device(r"NVIDIA L4", 121.0, 22.5, 300, 32),
    "A10": Device(r"NVIDIA A10", 125.0, 22.5, 600, 32),
    "A40": Device(r"NVIDIA A40", 149.7, 45.0, 696, 32),
    "T4": Device(r"Tesla T4", 65.0, 15.0, 320, 16),
    "RTX-3060": Device(r"NVIDIA GeForce RTX 3060", 25.5, 12.0, 360, 32),
    "RTX-3070": Device(r"NVIDIA GeForce RTX 3070", 40.6, 8.0, 448, 32),
    "RTX-3080": Device(r"NVIDIA GeForce RTX 3080", 59.5, 10.0, 760, 32),
    "RTX-3090": Device(r"NVIDIA GeForce RTX 3090", 71.2, 24.0, 936, 32),
    "RTX-4060-Ti": Device(r"NVIDIA GeForce RTX 4060 Ti", 44.1, 16.0, 288, 16),
    "RTX-4070": Device(r"NVIDIA GeForce RTX 4070", 58.3, 12.0, 504, 32),
    "RTX-4070-Ti": Device(r"NVIDIA GeForce RTX 4070 Ti", 80.2, 12.0, 504, 32),
    "RTX-4080": Device(r"NVIDIA GeForce RTX 4080", 97.5, 16.0, 717, 32),
    "RTX-4090": Device(r"NVIDIA GeForce RTX 4090", 165.2, 24.0, 1008, 32),
    "RTX-5070": Device(r"NVIDIA GeForce RTX 5070", 61.7, 12.0, 672, 64),
    "RTX-5070-Ti": Device(r"NVIDIA GeForce RTX 5070 Ti", 87.9, 16.0, 896, 64),
    "RTX-5080": Device(r"NVIDIA GeForce RTX 5080", 112.6, 16.0, 960, 64),
    "RTX-5090": Device(r"NVIDIA GeForce RTX 5090", 209.5, 31.8, 1792, 64),
    "RTX-A6000": Device(r"NVIDIA RTX A6000", 154.8, 48.0, 768, 32),
    "RTX-6000-Ada": Device(r"NVIDIA RTX 6000 Ada Generation", 364.0, 48.0, 960, 32),
    # NVIDIA's whitepaper of the RTX PRO Blackwell; the Max-Q and the Server Edition have other clocks.
    "RTX-PRO-6000": Device(r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 95.6, 1792, 64),
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
