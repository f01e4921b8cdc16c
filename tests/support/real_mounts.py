"""Mount real file systems for the length of a test or a campaign, as root and on one machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class CannotMount(Exception):
    """Why a file system cannot be mounted here: no rights, no program, no /dev/fuse."""


@contextmanager
def mounted(point: Path, *command: str) -> Iterator[Path]:
    """Run a command that mounts something at `point`, and unmount it at the end. Raises CannotMount."""
    point.mkdir(parents=True, exist_ok=True)
    if shutil.which(command[0]) is None:
        raise CannotMount(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not point.is_mount():
        raise CannotMount(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
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
