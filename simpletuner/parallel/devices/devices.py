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


def geforce(sms: int, boost_mhz: int) -> float:
    """TFLOP/s of dense bf16 with float32 accumulation: 512 FLOP per SM and clock.

    SMs and clocks are those of the whitepapers of GA102, Ada and RTX Blackwell, whose "Peak FP16 Tensor TFLOPS with
    FP32 Accumulate" this gives: 59.5 for a 3080, 71.2 for a 3090, 165.2 for a 4090, 209.5 for a 5090.
    """
    return round(sms * boost_mhz * 512e-6, 1)


# By the names that `simpletuner plan --gpu` takes.
# Links: 16 GB/s are PCIe 3.0 x16 or 4.0 x8, 32 PCIe 4.0 x16, 64 PCIe 5.0 x16, and 448 the seven links of an MI300X.
# Of the 3060, 3080 and 4060 Ti there are others of the same name with 8, 12 and 8 GB: `--gpu_memory` says so.
DEVICES = {
    "H100": Device(r"NVIDIA H100 \d+GB HBM3", 989.5, 79.6, 3350, 450),
    "H200": Device(r"NVIDIA H200", 989.5, 139.8, 4800, 450),
    "B200": Device(r"NVIDIA B200", 2250.0, 179.1, 8000, 900),
    "A100-80GB": Device(r"NVIDIA A100.*80GB", 312.0, 79.3, 2039, 300),
    "A100-40GB": Device(r"NVIDIA A100.*40GB", 312.0, 39.4, 1555, 300),
    # Data sheets of NVIDIA: BF16 without sparsity ("125 | 250*" of an A10, "149.7 | 299.4*" of an A40); memory less the
    # ECC of GDDR6. A T4 has no bf16: its number is of fp16. Not compared with the sheets line by line, which could not
    # be opened: L40S, L4, A10, T4, A6000, 6000 Ada and PRO 6000.
    "L40S": Device(r"NVIDIA L40S", 362.0, 45.0, 864, 32),
    "L4": Device(r"NVIDIA L4", 121.0, 22.5, 300, 32),
    "A10": Device(r"NVIDIA A10", 125.0, 22.5, 600, 32),
    "A40": Device(r"NVIDIA A40", 149.7, 45.0, 696, 32),
    "T4": Device(r"Tesla T4", 65.0, 15.0, 320, 16),
    "RTX-3060": Device(r"NVIDIA GeForce RTX 3060", geforce(28, 1777), 12.0, 360, 32),
    "RTX-3070": Device(r"NVIDIA GeForce RTX 3070", geforce(46, 1725), 8.0, 448, 32),
    "RTX-3080": Device(r"NVIDIA GeForce RTX 3080", geforce(68, 1710), 10.0, 760, 32),
    "RTX-3090": Device(r"NVIDIA GeForce RTX 3090", geforce(82, 1695), 24.0, 936, 32),
    "RTX-4060-Ti": Device(r"NVIDIA GeForce RTX 4060 Ti", geforce(34, 2535), 16.0, 288, 16),
    "RTX-4070": Device(r"NVIDIA GeForce RTX 4070", geforce(46, 2475), 12.0, 504, 32),
    "RTX-4070-Ti": Device(r"NVIDIA GeForce RTX 4070 Ti", geforce(60, 2610), 12.0, 504, 32),
    "RTX-4080": Device(r"NVIDIA GeForce RTX 4080", geforce(76, 2505), 16.0, 717, 32),
    "RTX-4090": Device(r"NVIDIA GeForce RTX 4090", geforce(128, 2520), 24.0, 1008, 32),
    "RTX-5070": Device(r"NVIDIA GeForce RTX 5070", geforce(48, 2512), 11.9, 672, 64),
    "RTX-5070-Ti": Device(r"NVIDIA GeForce RTX 5070 Ti", geforce(70, 2452), 15.9, 896, 64),
    "RTX-5080": Device(r"NVIDIA GeForce RTX 5080", geforce(84, 2617), 15.9, 960, 64),
    "RTX-5090": Device(r"NVIDIA GeForce RTX 5090", geforce(170, 2407), 31.8, 1792, 64),
    "RTX-A6000": Device(r"NVIDIA RTX A6000", 154.8, 48.0, 768, 32),
    "RTX-6000-Ada": Device(r"NVIDIA RTX 6000 Ada Generation", 364.0, 48.0, 960, 32),
    # NVIDIA's whitepaper of the RTX PRO Blackwell; the Max-Q and the Server Edition have other clocks.
    "RTX-PRO-6000": Device(r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 95.6, 1792, 64),
    # Data sheets of AMD. Each of an MI250's two dies is a device: half of the sheet's 362.1 and 3,277, and one link of
    # 50 GB/s to another module. The driver gives an MI250X (383.0) the same name.
    "MI250": Device(r"AMD Instinct MI250.*", 181.0, 64.0, 1638, 50),
    "MI300X": Device(r"AMD Instinct MI300X.*", 1307.4, 192.0, 5300, 448),
    "MI325X": Device(r"AMD Instinct MI325X.*", 1307.4, 256.0, 6000, 448),
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
