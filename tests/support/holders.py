"""Processes that hold a cache as a run does, until they are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CODE = """
import sys, time
from pathlib import Path
from simpletuner.system.files.locks import exclusive_lock
from simpletuner.system.files.lease_folder import shared_folders
from simpletuner.deepspeed.swap_files import create_swap_folder

hold = {"cache": lambda: shared_folders([Path(sys.argv[2])]), "file": lambda: exclusive_lock(Path(sys.argv[2])),
        "swap": lambda: create_swap_folder(Path(sys.argv[2]), Path("my-run"))}[sys.argv[1]]
with hold() as held:
    print(held, flush=True)
    sys.stdin.readline()
"""


class Holder(subprocess.Popen[str]):
    """A process that holds a cache folder, a lock file, or a swap folder below a path; `held` is that folder."""

    def __init__(self, what: str, path: Path) -> None:
        command = [sys.executable, "-c", CODE, what, str(path)]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.stdout is not None
        self.held = self.stdout.readline().strip()


@contextmanager
def holder(what: str, path: Path) -> Iterator[Holder]:
    """Hold something for as long as the block lasts, or until the process is killed."""
    with Holder(what, path) as process:
        yield process
        process.kill()
