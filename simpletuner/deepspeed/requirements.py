"""Requirements of DeepSpeed on this machine: platform, package, compiler, libaio, disk space.

Everything here is answered without importing torch or DeepSpeed, so that commands stay fast and a missing requirement
is reported before any rank starts. `simpletuner/deepspeed/startup.py` does the part that needs DeepSpeed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rich.filesize import decimal

from simpletuner.counting.zero_memory import estimate_for_settings
from simpletuner.errors import EnvironmentNotReady
from simpletuner.extras import install_command
from simpletuner.settings import Settings
from simpletuner.settings.foreign.deepspeed_config import deepspeed_options

INSTALL = install_command("deepspeed")
UNSUPPORTED_PLATFORMS = {"darwin": "macOS", "win32": "Windows"}
USE_FSDP = "use fsdp_enable=true, which runs wherever torch does, or set zero_stage=none"
OTHER_FOLDER = "set offload_param_path to a folder on a fast disk of this machine"

LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
COMPILE_TIMEOUT_SECONDS = 60


def check_settings(settings: Settings, num_parameters: int | None = None) -> list[str]:
    """Check platform and offload folder, and return warnings; nothing where DeepSpeed is off.

    Raises EnvironmentNotReady for an unsupported platform and for an offload folder that cannot be used. Free
    disk space is checked only if `num_parameters` is known.
    """
    options = deepspeed_options(settings)
    if options is None:
        return []
    check_platform()
    if options.nvme_path is not None:
        needed_bytes = estimate_for_settings(settings, num_parameters).disk_bytes if num_parameters else None
        check_disk(options.nvme_path, needed_bytes)
    return [] if is_installed() else [f"deepspeed is not installed on this machine: {INSTALL}"]


def check_platform(platform: str = sys.platform) -> None:
    """Raise EnvironmentNotReady where DeepSpeed does not run: macOS, Windows, torch for AMD GPUs (ROCm)."""
    if platform in UNSUPPORTED_PLATFORMS:
        raise EnvironmentNotReady(
            f"DeepSpeed does not run on {UNSUPPORTED_PLATFORMS[platform]}: its kernels need Linux and CUDA, or a CPU",
            USE_FSDP,
        )
    if version := rocm_version():
        raise EnvironmentNotReady(
            f"DeepSpeed is not supported with torch for ROCm ({version}): its kernels are built for CUDA", USE_FSDP
        )


def check_installed() -> None:
    """Raise EnvironmentNotReady where DeepSpeed is not installed."""
    if not is_installed():
        raise EnvironmentNotReady("deepspeed is not installed", INSTALL)


def is_installed() -> bool:
    return find_spec("deepspeed") is not None


def rocm_version() -> str:
    """Return the ROCm version that the installed torch was built for; empty if for none."""
    # Read from torch/version.py, as text: `import torch` takes seconds.
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "version.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if found := re.search(r"""^hip\b[^=]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE):
            return found[1]
    return ""


def check_disk(folder: Path, needed_bytes: int | None) -> None:
    """Raise EnvironmentNotReady for a folder that cannot be created or written, or has too little free space.

    `needed_bytes` is what all ranks of this machine write there; None if unknown. Creates nothing.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise EnvironmentNotReady(f"offload_param_path = {folder}: {nearest} is a file, not a folder", OTHER_FOLDER)
    try:
        with tempfile.TemporaryFile(dir=nearest):  # access rights alone do not show a read-only file system
            pass
    except OSError as error:
        what = "written" if nearest == folder else "created"
        raise EnvironmentNotReady(
            f"offload_param_path = {folder} cannot be {what}: {error.strerror}", OTHER_FOLDER
        ) from None
    filesystem = os.statvfs(nearest)
    # f_bavail, since f_bfree also counts the blocks that are reserved for root.
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    if needed_bytes is not None and free_bytes < needed_bytes:
        raise EnvironmentNotReady(
            f"offload_param_path = {folder} has {decimal(free_bytes)} free; "
            f"DeepSpeed needs about {decimal(needed_bytes)} there",
            f"df -h {nearest}   # free space, offload less, or name a larger disk",
        )


def check_compiler() -> None:
    """Raise EnvironmentNotReady, with a fix, where DeepSpeed cannot compile its disk operators.

    Adds this Python's scripts folder to PATH.
    """
    # ninja is installed with DeepSpeed, but its folder is on PATH only in an activated virtual environment.
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + scripts
    compiler = os.environ.get("CXX", "c++")
    if shutil.which("ninja") is None:
        raise cannot_compile("there is no `ninja` on PATH", "pip install ninja")
    if shutil.which(compiler) is None:
        raise cannot_compile(f"there is no compiler `{compiler}`", "apt install g++, or set CXX")
    if not links_libaio(compiler):
        raise cannot_compile(
            "libaio and its headers are missing",
            "apt install libaio-dev, or say where they are in CFLAGS and LDFLAGS",
        )


def links_libaio(compiler: str) -> bool:
    """Compile and link a program that calls libaio, with the flags that DeepSpeed uses too."""
    flags = {name: shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(LIBAIO_PROGRAM, encoding="utf-8")
        output = str(source.with_suffix(""))
        # -laio comes after the source: linkers take from a library only what is missing when they reach it.
        command = [compiler, *flags["CFLAGS"], str(source), "-o", output, *flags["LDFLAGS"], "-laio"]
        try:
            return subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_SECONDS).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def cannot_compile(why: str, hint: str, operator: str = "async_io") -> EnvironmentNotReady:
    """Build the error for an operator that DeepSpeed compiles at first use."""
    return EnvironmentNotReady(f"DeepSpeed cannot compile {operator}, which it needs to offload to a disk: {why}", hint)
