"""What forked processes run that detect blocks at once, and that die while they write what they found."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from simpletuner.counting.block_detection import detect
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.atomic import unfinished_path
from simpletuner.system.files.cache_files import block_cache_paths, lock_of
from simpletuner.system.files.locks import exclusive_lock


def detect_often(folder: str, home: str, rounds: int) -> None:
    """Detect what a folder holds, each time as if anew; a file in it says that it was remembered once."""
    os.environ["SIMPLETUNER_HOME"] = home
    warnings: list[str] = []
    for _ in range(rounds):
        detect(Model(pretrained_model_name_or_path=folder), refresh=True, warn=warnings.append)
        (Path(folder) / "finished").touch()
        time.sleep(0.1)  # or those who go on for ever would keep the lock to themselves
    assert not warnings, warnings


def die_writing(home: str) -> None:
    """Be killed in the middle of writing, with the lock held."""
    os.environ["SIMPLETUNER_HOME"] = home
    path, _ = block_cache_paths()
    with exclusive_lock(lock_of(path)):
        unfinished_path(path).write_text('{"half": ')
        os.kill(os.getpid(), signal.SIGKILL)
