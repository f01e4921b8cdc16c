"""What compiles DeepSpeed's disk operators, tried before a rank is started and without importing torch or DeepSpeed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from simpletuner.errors import EnvironmentNotReady

CALLS_LIBAIO = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
TRY_SECONDS = 60


def check_toolchain() -> None:
    """Raise EnvironmentFault, with the command that mends it, where DeepSpeed cannot compile its disk operators."""
    own = sysconfig.get_path("scripts")
    if own not in os.environ["PATH"].split(os.pathsep):  # ninja came with DeepSpeed; its folder need not be active
        os.environ["PATH"] += os.pathsep + own
    compiler = os.environ.get("CXX", "c++")
    if shutil.which("ninja") is None:
        raise EnvironmentNotReady(cannot("there is no `ninja` on PATH"), "pip install ninja")
    if shutil.which(compiler) is None:
        raise EnvironmentNotReady(cannot(f"there is no compiler `{compiler}`"), "apt install g++, or set CXX")
    if not links([compiler]):
        raise EnvironmentNotReady(
            cannot("libaio and its headers are missing"),
            "apt install libaio-dev, or say where they are in CFLAGS and LDFLAGS",
        )


def links(compiler: Sequence[str]) -> bool:
    """Return whether a program that calls libaio compiles and links, with the flags that DeepSpeed uses, too."""
    flags = {name: shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")}
    with TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(CALLS_LIBAIO, encoding="utf-8")
        output = str(source.with_suffix(""))
        command = [*compiler, *flags["CFLAGS"], str(source), "-o", output, *flags["LDFLAGS"], "-laio"]
        try:
            return subprocess.run(command, capture_output=True, timeout=TRY_SECONDS).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def cannot(why: str, operator: str = "async_io") -> str:
    """Return the sentence of a failure."""
    return f"DeepSpeed cannot compile {operator}, which it needs to offload to a disk: {why}"
