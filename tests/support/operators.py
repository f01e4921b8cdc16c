"""Compile what tests load, once per checkout: DeepSpeed's operators for disks, and the fake GPU.

The Makefile runs this before the tests, whose time it would be otherwise: two CPU minutes without ccache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]


def compile_disk_operators() -> None:
    """Compile DeepSpeed's operators, or load them where they are compiled.

    torch calls ccache where it is installed. That takes 6 s in any later checkout: paths within one are hashed as seen
    from the folder that is compiled in.
    """
    path = f"{SUPPORT / 'compiler'}{os.pathsep}{os.environ['PATH']}"
    ccache = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", "CCACHE_COMPILERCHECK": "content", "PATH": path}
    os.environ.update(ccache)
    from simpletuner.deepspeed import startup

    startup.compile_disk_operators(print, lambda: None)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".torch_extensions"))
    os.environ["DS_ACCELERATOR"] = "cpu"
    # A process of its own: torch asks for CUDA hooks once, and DeepSpeed would find them.
    subprocess.run([sys.executable, "-c", "import fake_gpu.device"], cwd=SUPPORT, check=True)
    if find_spec("deepspeed") is not None:
        compile_disk_operators()
