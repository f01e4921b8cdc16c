"""What DeepSpeed compiles at first use: only what it reads and writes disks with, since torch's optimizer needs none.

torch compiles into a folder per operator and marks it with a file, `lock`, for which others wait without end; who is
killed meanwhile leaves it there. So we compile one after the other, and look first whether that file is somebody's.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simpletuner.deepspeed.toolchain import cannot, check_toolchain
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.locks import exclusive_lock

COMPILE_SECONDS = 1800
"""How long one rank waits for another that compiles."""

QUIET_SECONDS = 120
"""A compile that nobody here carries on, and that has written nothing for so long, counts as dead; it could be that of
another machine that shares the home folder."""


def compile_disk_operators(stop: Callable[[], None]) -> None:
    """Compile what reads and writes disks, or find it compiled.

    Raises EnvironmentFault, with the command that mends it, where that is not possible.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder  # pyright: ignore[reportAttributeAccessIssue]

    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):
        folder = build_folder(builder.name)
        with exclusive_lock(folder.with_name(f".{folder.name}.simpletuner-lock"), COMPILE_SECONDS):
            wait_for_compile(folder, builder.name, stop)
            with contextlib.redirect_stdout(sys.stderr):
                check_toolchain()
                loaded(builder)


def build_folder(name: str) -> Path:
    """Return the folder in which torch compiles an operator."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False))


def loaded(builder: Any) -> None:
    """Compile if need be, and load. Raises EnvironmentFault with the last of what the compiler said."""
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        hint = f"rm -r {build_folder(builder.name)}, then run the same command again; `--debug` shows all that it said"
        why = lines[-1].strip() if lines else type(error).__name__
        raise EnvironmentNotReady(cannot(why, builder.name), hint) from error


def wait_for_compile(folder: Path, name: str, stop: Callable[[], None], quiet_seconds: float = QUIET_SECONDS) -> None:
    """Wait while somebody compiles an operator. Raises EnvironmentFault for a lock that a killed one left."""
    lock = folder / "lock"
    while lock.exists():
        stop()
        if not is_open_here(lock) and quiet_for(folder) > quiet_seconds:
            raise EnvironmentNotReady(
                f"a compile of DeepSpeed's {name} was killed: {lock} is left, and DeepSpeed would wait for it for ever",
                f"see that nobody compiles it on another machine, then `rm {lock}`",
            )
        time.sleep(0.2)


def is_open_here(path: Path) -> bool:
    """Return whether a process of ours on this machine has a file open, as torch has its lock while it compiles."""
    for entry in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it ended, or is not ours
            if any(str(link.readlink()) == str(path) for link in entry.iterdir()):
                return True
    return False


def quiet_for(folder: Path) -> float:
    """Return how many seconds ago anything in a folder changed."""
    changes = [folder.stat().st_mtime]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            changes.append(path.stat().st_mtime)
    return time.time() - max(changes)
