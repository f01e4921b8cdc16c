"""What can be known to be wrong with DeepSpeed before anything is encoded, and what dead runs left."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable

import torch.distributed as dist

from simpletuner.deepspeed.operators import compile_disk_operators
from simpletuner.deepspeed.platform_support import check_installed
from simpletuner.deepspeed.swap_files import clear_dead
from simpletuner.parallel.world import World
from simpletuner.settings.deepspeed.config import DeepSpeedOptions

DEPRECATED_COLLECTIVES = r"`torch\.distributed\.\w+` is deprecated"


def make_ready(zero: DeepSpeedOptions, world: World, say: Callable[[str], None], stop: Callable[[], None]) -> None:
    """Import DeepSpeed, and clean and compile what offloading to a disk needs.

    Raises EnvironmentFault, with the command that mends it, for whatever is missing.
    """
    import_deepspeed(world)
    folder = zero.nvme_path
    if folder is None:
        return
    if world.local_rank == 0 and (owners := clear_dead(folder)):
        say(f"removed what dead runs had offloaded to {folder}: {'; '.join(sorted({str(owner) for owner in owners}))}")
    compile_disk_operators(stop)


def import_deepspeed(world: World) -> None:
    """Import DeepSpeed for this world's device, let it use this world's ranks, and keep it from the terminal."""
    check_installed()
    os.environ["DS_ACCELERATOR"] = world.device.type
    # DeepSpeed calls them by their older names, several times in each process.
    warnings.filterwarnings("ignore", message=DEPRECATED_COLLECTIVES, category=FutureWarning)
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        import deepspeed.ops

        for handler in logging.getLogger("DeepSpeed").handlers:
            handler.setStream(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
        if world.device.type == "cpu":
            deepspeed.ops.__dict__["__compatible_ops__"] = {}  # else it compiles an all-reduce that only inference uses
        deepspeed.init_distributed(dist_backend=dist.get_backend())
