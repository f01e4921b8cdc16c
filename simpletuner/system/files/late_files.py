"""Files that another machine has written and named, and that a network file system shows late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.mounts import find_mount, read_mounts

# Longest wait for a file of known name: NFS clients may keep attributes for 60 s (acdirmax), sshfs 20 s.
LATE_SECONDS = 90.0
POLL_SECONDS = 0.1

# The way to mount a file system so that it shows files sooner, by its type in /proc/mounts.
SHORTER_CACHES = {
    **dict.fromkeys(("nfs", "nfs4"), "mount with shorter caches: `lookupcache=positive,acdirmax=5` in /etc/fstab"),
    "fuse.sshfs": "mount with `sshfs -o dir_cache=no`",
    "fuse.rclone": "mount with `rclone mount --dir-cache-time=5s --poll-interval=0`: its default is 5 minutes",
    "fuse.s3fs": "mount with `s3fs -o stat_cache_expire=5`",
    "fuse.gcsfuse": "mount with `gcsfuse --metadata-cache-ttl-secs=5`",
    "fuse.glusterfs": "mount with `-o attribute-timeout=0,entry-timeout=0`",
}


def wait_for_files(folder: Path, sizes: Mapping[str, int], stop: Callable[[], None]) -> None:
    """Wait until files have at least the sizes reported by another machine.

    Raises EnvironmentNotReady with the first one that does not after LATE_SECONDS.
    """
    if late := find_late(folder, sizes, stop, LATE_SECONDS):
        raise EnvironmentNotReady(
            f"{folder / late}, which another rank has written, is not shown here after {LATE_SECONDS:.0f} s",
            shorter_caches(folder),
        )


def find_late(folder: Path, sizes: Mapping[str, int], stop: Callable[[], None], seconds: float) -> str:
    """Return the first file that does not have its size after some seconds; empty where all have."""
    waiting, end = [*sizes], time.monotonic() + seconds
    while waiting := [name for name in waiting if size_of(folder / name) < sizes[name]]:
        if time.monotonic() > end:
            return waiting[0]
        stop()
        time.sleep(POLL_SECONDS)
        refresh(folder)
    return ""


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def refresh(folder: Path) -> None:
    """List a folder, and the one above, which may remember that it is not there: NFS then asks its server."""
    for listed in (folder.parent, folder):
        try:
            list(listed.iterdir())
        except OSError:
            return


def shorter_caches(folder: Path) -> str:
    """Mount options with which the file system of a folder shows new files sooner."""
    mount = find_mount(PurePosixPath(folder.resolve()), read_mounts())
    fstype = mount.fstype if mount is not None else ""
    return SHORTER_CACHES.get(fstype, f"`simpletuner nfs check --path={folder}` on each machine says how late")
