"""Mounted filesystems, from /proc/self/mountinfo, see proc(5).

`36 35 98:0 /root /mount/point rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """Mount point; `root` is the part of its source that is mounted, which shows bind mounts; `device` is `8:1`."""

    number: int
    parent: int
    device: str
    root: str
    point: PurePosixPath
    fstype: str
    source: str
    options: tuple[str, ...]

    def covers(self, path: PurePosixPath) -> bool:
        return path == self.point or self.point in path.parents

    def value_of(self, option: str) -> str:
        """Return the value of `option=value`; empty if it is not set."""
        return next((entry.partition("=")[2] for entry in self.options if entry.startswith(f"{option}=")), "")


def read_mounts(mountinfo: Path = MOUNTINFO) -> list[Mount]:
    """Return the mounts that this process sees; none where there is no such file, as on macOS."""
    return parse_mountinfo(mountinfo.read_text(errors="surrogateescape")) if mountinfo.exists() else []


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse a mountinfo file, in its order; malformed lines are skipped."""
    return [mount for line in text.splitlines() if (mount := parse_mount(line)) is not None]


def parse_mount(line: str) -> Mount | None:
    own, dash, rest = line.partition(" - ")
    before, after = own.split(" "), rest.split(" ")
    if not dash or len(before) < 6 or len(after) < 3 or not (before[0].isdigit() and before[1].isdigit()):
        return None
    options = tuple(dict.fromkeys([*before[5].split(","), *after[2].split(",")]))
    root, point, source = (unescape(text) for text in (before[3], before[4], after[1]))
    return Mount(int(before[0]), int(before[1]), before[2], root, PurePosixPath(point), after[0], source, options)


def unescape(text: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def find_mount(path: PurePosixPath, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that an absolute path without symlinks lies on."""
    # Walk down as the kernel does: of the mounts on the present one, the first on the way to the path. So mounts that a
    # later one hides are skipped, and of several on one point the topmost is found, whatever the order of the file.
    numbers = {mount.number for mount in mounts}
    covering = [mount for mount in mounts if mount.covers(path)]
    roots = [mount for mount in covering if mount.parent not in numbers or mount.parent == mount.number]
    if not roots:
        return max(covering, key=depth, default=None)
    here = max(reversed(roots), key=depth)
    visited = {here.number}
    while upon := [mount for mount in covering if mount.parent == here.number and mount.number not in visited]:
        here = min(reversed(upon), key=depth)
        visited.add(here.number)
    return here


def depth(mount: Mount) -> int:
    return len(mount.point.parts)
