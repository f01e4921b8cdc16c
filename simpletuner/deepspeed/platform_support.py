"""Whether DeepSpeed can run on this machine, found without importing it or torch."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady

INSTALL = "pip install 'simpletuner[deepspeed]'"
PLATFORMS = {"darwin": "macOS", "win32": "Windows"}
INSTEAD = "use fsdp_enable=true, which runs wherever torch does, or set zero_stage=none"


def check_platform(platform: str = sys.platform) -> None:
    """Raise EnvironmentFault where DeepSpeed does not run: macOS, Windows, and torch for AMD's GPUs (ROCm)."""
    if platform in PLATFORMS:
        raise EnvironmentNotReady(
            f"DeepSpeed does not run on {PLATFORMS[platform]}: its kernels need Linux and CUDA, or a CPU", INSTEAD
        )
    if version := rocm_version():
        raise EnvironmentNotReady(
            f"DeepSpeed is not supported with torch for ROCm ({version}): its kernels are built for CUDA", INSTEAD
        )


def check_installed() -> None:
    """Raise EnvironmentFault where DeepSpeed is not installed."""
    if not is_installed():
        raise EnvironmentNotReady("deepspeed is not installed", INSTALL)


def is_installed() -> bool:
    """Return whether DeepSpeed is installed."""
    return find_spec("deepspeed") is not None


def rocm_version() -> str:
    """Return for which ROCm the installed torch was built; empty if for none. Its version.py says so."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "version.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found := re.search(r"""^hip\b[^=]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE):
            return found[1]
    return ""
