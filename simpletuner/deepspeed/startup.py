"""Start DeepSpeed in a rank: import it, remove swap folders of dead runs, compile its disk operators.

This happens before anything is encoded, so that a failure costs seconds, not hours.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from simpletuner.deepspeed.requirements import cannot_compile, check_compiler, check_installed
from simpletuner.deepspeed.swap_files import remove_dead_swap_folders
from simpletuner.parallel.world import World
from simpletuner.private_api import of_torch
from simpletuner.run_log import take_over
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.foreign.deepspeed_config import deepspeed_options
from simpletuner.system.files.locks import exclusive_lock

COMPILE_WAIT_SECONDS = 1800
"""Longest wait for another rank that compiles."""

# A compilation counts as killed if no process of this machine has its lock open and it has written nothing
# for so long: it could belong to another machine or container that shares the home folder. One source takes
# 20 to 40 s.
STALE_LOCK_SECONDS = 120


def start_deepspeed(
    settings: Settings, world: World, say: Callable[[str], None], check_stop: Callable[[], None]
) -> None:
    """Import DeepSpeed; to offload to a disk, remove what dead runs left there, and compile operators.

    `check_stop` is called while waiting, and may raise. Raises EnvironmentNotReady, with the command that
    fixes it, for whatever is missing.
    """
    import_deepspeed(world)
    options = deepspeed_options(settings)
    if options is None or (folder := options.nvme_path) is None:
        return
    if world.local_rank == 0 and (owners := remove_dead_swap_folders(folder)):
        names = "; ".join(sorted({str(owner) for owner in owners}))
        say(f"removed what dead runs had offloaded to {folder}: {names}")
    compile_disk_operators(say, check_stop)


def import_deepspeed(world: World) -> None:
    """Import DeepSpeed for this rank's device, in torch's process group, with its output on stderr."""
    check_installed()
    os.environ["DS_ACCELERATOR"] = (
        world.device.type
    )  # else it looks for accelerators, and takes CUDA where there is one
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # zero.Init reads it without a default
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        import deepspeed.ops

        take_over("DeepSpeed")  # utils/logging.py binds its handler to the stdout of the time of import
        if world.device.type == "cpu":
            # comm/torch.py, build_shm_op: on CPUs it would compile an all-reduce that only inference uses.
            deepspeed.ops.__dict__["__compatible_ops__"] = {}
        deepspeed.init_distributed(dist_backend=dist.get_backend())


def compile_disk_operators(say: Callable[[str], None], check_stop: Callable[[], None]) -> None:
    """Load the operators that read and write disks; one rank after the other compiles those missing.

    Others are not needed: the optimizer is torch's. Raises EnvironmentNotReady with the remedy.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder  # pyright: ignore[reportAttributeAccessIssue]

    keep_cpu_info()
    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):
        folder = build_folder(builder.name)
        # torch marks a running compilation by a file named `lock` in the folder (torch/utils/file_baton.py)
        # and waits for that file without a limit; a killed compilation leaves it there. So ranks take turns
        # behind a lock of our own, which ends with its process, and look at torch's first.
        with exclusive_lock(folder.with_name(f".{folder.name}.simpletuner-lock"), COMPILE_WAIT_SECONDS):
            wait_for_compile(folder, say, check_stop)
            with contextlib.redirect_stdout(sys.stderr):
                check_compiler()
                load_operator(builder)


def keep_cpu_info() -> None:
    """Let py-cpuinfo answer its first question again without asking the CPU.

    DeepSpeed asks twice (builder.py, cpu_arch and simd_width), each time in a new process that measures clock rates for
    1.4 s, while all other ranks of the machine wait for their turn.
    """
    with contextlib.suppress(ImportError):  # DeepSpeed asks lscpu then
        import cpuinfo

        if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
            cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def build_folder(operator: str) -> Path:
    return Path(of_torch.operator_build_folder(operator))


def load_operator(builder: Any) -> None:
    """Load an operator, compiled if needed. Raises EnvironmentNotReady with the compiler's last line."""
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = lines[-1].strip() if lines else type(error).__name__
        hint = f"rm -r {build_folder(builder.name)}, then run the same command again; `--debug` shows the whole output"
        raise cannot_compile(why, hint, builder.name) from error


def wait_for_compile(
    folder: Path,
    say: Callable[[str], None],
    check_stop: Callable[[], None],
    stale_seconds: float = STALE_LOCK_SECONDS,
) -> None:
    """Wait while any process compiles an operator; remove the lock of one that was killed."""
    lock, waiting = folder / "lock", False
    while lock.exists():
        check_stop()
        if not is_open_here(lock) and seconds_since_change(folder) > stale_seconds:
            say(f"a compilation of DeepSpeed's {folder.name} was killed: removing {lock}, which it left")
            lock.unlink(missing_ok=True)
        elif not waiting:
            say(f"waiting for another process that compiles DeepSpeed's {folder.name}: it holds {lock}")
            waiting = True
        time.sleep(0.2)


def is_open_here(path: Path) -> bool:
    """True if a process of this user here has the file open: torch holds its lock so while compiling."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if any(str(link.readlink()) == str(path) for link in folder.iterdir()):
                return True
    return False


def seconds_since_change(folder: Path) -> float:
    """Age of the newest change of a folder or a file in it."""
    changes = [folder.stat().st_mtime]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            changes.append(path.stat().st_mtime)
    return time.time() - max(changes)
