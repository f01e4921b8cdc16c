"""Read /proc/self/mountinfo, and find the mount that a path lies on.

A line: `36 35 98:0 /root /mount/point rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2`, see proc(5).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """One mount: `root` is the part of its source that is mounted, which tells bind mounts."""

    number: int
    parent: int
    root: str
    point: PurePosixPath
    fstype: str
    source: str
    options: tuple[str, ...]

    def covers(self, path: PurePosixPath) -> bool:
        """Return whether a path lies at or below this mount's point."""
        return path == self.point or self.point in path.parents

    def value_of(self, option: str) -> str:
        """Return the value of `option=value`, or nothing."""
        return next((entry.partition("=")[2] for entry in self.options if entry.startswith(f"{option}=")), "")


def parsed(text: str) -> list[Mount]:
    """Return the mounts of a mountinfo file in its order; lines that do not have its form are left out."""
    return [mount for line in text.splitlines() if (mount := mount_of_line(line)) is not None]


def mount_of_line(line: str) -> Mount | None:
    """Return the mount that one line describes."""
    own, dash, rest = line.partition(" - ")
    before, after = own.split(" "), rest.split(" ")
    if not dash or len(before) < 6 or len(after) < 3 or not (before[0].isdigit() and before[1].isdigit()):
        return None
    options = tuple(dict.fromkeys([*before[5].split(","), *after[2].split(",")]))
    root, point, source = (unescaped(text) for text in (before[3], before[4], after[1]))
    return Mount(int(before[0]), int(before[1]), root, PurePosixPath(point), after[0], source, options)


def unescaped(text: str) -> str:
    """Return text with the kernel's octal escapes of space, tab, newline and backslash undone."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def mount_of(path: PurePosixPath, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that an absolute path without symlinks lies on.

    Walks down as the kernel does: of the mounts upon the present one, the first on the way to the path. So a mount
    that a later one hides is passed by, and of several on one point the topmost is found, whatever the file's order.
    """
    numbers = {mount.number for mount in mounts}
    covering = [mount for mount in mounts if mount.covers(path)]
    roots = [mount for mount in covering if mount.parent not in numbers or mount.parent == mount.number]
    if not roots:
        return max(covering, key=depth, default=None)
    here = max(reversed(roots), key=depth)
    passed = {here.number}
    while upon := [mount for mount in covering if mount.parent == here.number and mount.number not in passed]:
        here = min(reversed(upon), key=depth)
        passed.add(here.number)
    return here


def depth(mount: Mount) -> int:
    """Return how many folders deep a mount lies."""
    return len(mount.point.parts)
