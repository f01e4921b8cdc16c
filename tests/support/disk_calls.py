"""The calls that decide what is left after a power failure, as a process makes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

Calls = list[tuple[str, str, int]]
"""What was synced, with its size at that time, or what a rename put in place (size -1), by its path."""


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """Record each successful fsync and rename of this process, in their order."""
    calls: Calls = []

    def sync(real: Any, descriptor: int) -> None:
        real(descriptor)
        calls.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink()), os.fstat(descriptor).st_size))

    def rename(real: Any, source: Any, target: Any, **folders: int) -> None:
        real(source, target, **folders)
        folder = f"/proc/self/fd/{folders['dst_dir_fd']}" if folders else "."
        calls.append(("rename", os.path.realpath(Path(folder, target)), -1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", partial(sync, os.fsync))
        for name in ("rename", "replace"):
            patch.setattr(os, name, partial(rename, getattr(os, name)))
        yield calls
