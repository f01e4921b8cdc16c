"""A file system that lacks what others have, as the system calls of a process see it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LACKS = {
    "locks": (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK),  # Lustre without -o flock, FUSE, NFS 3 without lockd
    "syncing folders": (errno.EINVAL, errno.EOPNOTSUPP),
    "syncing": (errno.EINVAL, errno.ENOSYS),
    "replacing": (errno.EEXIST, errno.EOPNOTSUPP),
    "hard links": (errno.EPERM, errno.EOPNOTSUPP),
}


@contextmanager
def file_system_without(what: str, number: int) -> Iterator[None]:
    """Let system calls of this process fail as on such a file system."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    def sync(descriptor: int, real: Any = os.fsync) -> None:
        if what == "syncing" or Path(f"/proc/self/fd/{descriptor}").is_dir():
            fail()
        real(descriptor)

    def replace(source: Any, target: Any, real: Any = os.replace, **folders: Any) -> None:
        try:
            os.stat(target, dir_fd=folders.get("dst_dir_fd"), follow_symlinks=False)
        except FileNotFoundError:
            real(source, target, **folders)
        else:
            fail()

    with pytest.MonkeyPatch.context() as patch:
        if what == "locks":
            patch.setattr(fcntl, "flock", fail)
        elif what.startswith("syncing"):
            patch.setattr(os, "fsync", sync)
        elif what == "hard links":
            patch.setattr(os, "link", fail)
        else:
            patch.setattr(os, "replace", replace)
            patch.setattr(os, "rename", lambda *names, real=os.rename, **folders: replace(*names, real=real, **folders))
        yield


def command_line_without(what: str, number: int, arguments: list[str]) -> None:
    """Run the command line on such a file system."""
    import ranks

    with file_system_without(what, number):
        ranks.command_line(arguments)
