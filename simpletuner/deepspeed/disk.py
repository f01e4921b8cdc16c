"""The folder for what DeepSpeed offloads to files: whether it can be used, and has room."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.numbers import format_gb

ELSEWHERE = "set offload_param_path to a folder on a fast disk of this machine"


def check_disk(folder: Path, need_bytes: int | None) -> None:
    """Raise EnvironmentFault for a folder that cannot be made or written, or has too little room.

    `need_bytes` is what all ranks of this machine put there; None if the size of the model is not known.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise EnvironmentNotReady(f"offload_param_path = {folder}: {nearest} is a file, not a folder", ELSEWHERE)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        what = "written" if nearest == folder else "made"
        raise EnvironmentNotReady(
            f"offload_param_path = {folder} cannot be {what}: {error.strerror}", ELSEWHERE
        ) from None
    state = os.statvfs(nearest)
    free = state.f_bavail * state.f_frsize
    if need_bytes is not None and free < need_bytes:
        raise EnvironmentNotReady(
            f"offload_param_path = {folder} has {format_gb(free)} free; "
            f"DeepSpeed needs about {format_gb(need_bytes)} there",
            f"df -h {nearest}   # make room, offload less, or name a larger disk",
        )
