"""Mount real file systems for the length of a test or a campaign, as root and on one machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ranks

SFTP_SERVER = "/usr/lib/openssh/sftp-server"
CLONE_NEWNS = 0x20000  # sched.h


class CannotMount(Exception):
    """Why a file system cannot be mounted here: no rights, no program, no /dev/fuse."""


@contextmanager
def mounted(point: Path, *command: str) -> Iterator[Path]:
    """Run a command that mounts something at `point`, and unmount it at the end. Raises CannotMount."""
    point.mkdir(parents=True, exist_ok=True)
    if shutil.which(command[0]) is None:
        raise CannotMount(f"{command[0]} is not installed")
    with tempfile.TemporaryFile() as said:  # no pipe: what stays in the background, as gocryptfs does, keeps it open
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said).returncode
        if code or not point.is_mount():
            said.seek(0)
            raise CannotMount(f"{command[0]}: {said.read().decode(errors='replace').strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@contextmanager
def overlay(base: Path) -> Iterator[Path]:
    """Mount an overlay whose lower layer is `base/lower`, as a container has the folders of its image."""
    for name in ("lower", "upper", "work"):
        (base / name).mkdir(exist_ok=True)
    options = f"lowerdir={base / 'lower'},upperdir={base / 'upper'},workdir={base / 'work'}"
    with mounted(base / "all", "mount", "-t", "overlay", "overlay", "-o", options, str(base / "all")) as point:
        yield point


@contextmanager
def or_skipped() -> Iterator[None]:
    """Skip a test, with the reason, where nothing may be mounted."""
    try:
        yield
    except CannotMount as why:
        pytest.skip(f"cannot mount here: {why}")


def tree_of(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder with their content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def bindfs(base: Path) -> Iterator[Path]:
    """Mount `base/below` once more through FUSE, where a file that is being replaced cannot be opened for a moment."""
    (base / "below").mkdir(exist_ok=True)
    with mounted(base / "fuse", "bindfs", str(base / "below"), str(base / "fuse")) as point:
        yield point


@contextmanager
def sshfs_views(base: Path, *options: str, count: int = 2) -> Iterator[list[Path]]:
    """Mount `base/below` by sshfs several times, each as one machine does: no view hears of what others change."""
    (base / "below").mkdir(exist_ok=True)
    server = base / "ssh"
    server.write_text(f"#!/bin/sh\nexec {SFTP_SERVER}\n")
    server.chmod(0o755)
    given = [f"-o{option}" for option in (f"ssh_command={server}", *options)]
    with ExitStack() as stack:
        points = [base / f"view{number}" for number in range(count)]
        yield [
            stack.enter_context(mounted(each, "sshfs", *given, f"none:{base / 'below'}", str(each))) for each in points
        ]


def in_own_view(views: list[str], share: str, arguments: list[str]) -> None:
    """Run the command line as a rank of a machine that has its own mount of `share`, in a mount namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", views[int(os.environ["RANK"])], share], check=True)
    ranks.command_line(arguments)
