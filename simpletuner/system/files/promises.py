"""Locks, syncing, replacing a file: what some file systems lack. A run does without, and says what is lost by it.

Lustre without `-o flock` answers ENOSYS to flock(2), others EOPNOTSUPP; FUSE may answer EINVAL to fsync(2) of a folder,
and EEXIST to rename(2) where the new name is taken.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath

from simpletuner.system.files.file_systems import file_system_at
from simpletuner.system.files.mounts import find_mount, read_mounts

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
NO_REPLACING = (errno.EEXIST, errno.ENOSYS, errno.EOPNOTSUPP)
BY_RECORD = "a second run on another machine is found by the record in .lock, which takes longer"
NOT_FOUND = "nothing finds a second run on another machine for certain, which rclone may never show here"
"""With --vfs-cache-mode=full, a machine that has written a file goes on reading its own (rclone 1.60.1)."""
PROBE = ".simpletuner-probe-"
MAY_SAY = "`simpletuner nfs check --path FOLDER` says more; Lustre has locks when it is mounted with `flock`"


def sync(descriptor: int) -> None:
    """Have a file or folder written to its disk, if its file system can. Raises OSError where writing fails."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def rename_over(new: Path | str, name: Path | str, folder: int | None = None) -> None:
    """Give a file a name that another one may have, which it replaces. Raises OSError.

    At once, but where the file system cannot: a kill in between leaves both files under other names, and loses none.
    """
    try:
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in NO_REPLACING or not is_regular(name, folder):
            raise
        old = Path(name).with_name(f".{Path(name).name}.old")
        with suppress(FileNotFoundError):
            os.unlink(old, dir_fd=folder)
        os.rename(name, old, src_dir_fd=folder, dst_dir_fd=folder)
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.unlink(old, dir_fd=folder)


def is_regular(name: Path | str, folder: int | None) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def missing_promises(folder: Path) -> list[str]:
    """Try what a run relies on in a folder; return what cannot be promised there, each in a sentence."""
    first, second = (folder / f"{PROBE}{secrets.token_hex(8)}" for _ in range(2))
    found = []
    with suppress(OSError):  # a full disk, or a folder that may not be written: said by what needs it
        try:
            for path in (first, second):
                path.touch(exist_ok=False)
            if not can_lock(first):
                found.append(f"has no file locks: {BY_RECORD}")
            elif (system := file_system_at(folder)).keeps_locks_to_itself:
                found.append(f"keeps file locks on one machine: {NOT_FOUND if system.name == 'rclone' else BY_RECORD}")
            if not can_sync(first, folder):
                found.append("cannot sync: a power failure may take the newest files, and a checkpoint with them")
            if not can_replace(second, first):
                found.append("cannot replace a file at once: a kill may leave one under a name that ends with .old")
        finally:
            for path in (first, second):
                path.unlink(missing_ok=True)
    return [f"{folder}, on {file_system_of(folder)}, {what}" for what in found]


def can_lock(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in NO_LOCKS
    return True


def can_sync(*paths: Path) -> bool:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            return error.errno not in NO_SYNC
        finally:
            os.close(descriptor)
    return True


def can_replace(new: Path, name: Path) -> bool:
    try:
        new.replace(name)
    except OSError as error:
        return error.errno not in NO_REPLACING
    return True


def file_system_of(folder: Path) -> str:
    """Return the kind of a folder's file system and where it is mounted."""
    mount = find_mount(PurePosixPath(folder.resolve()), read_mounts())
    return f"{mount.fstype} at {mount.point}" if mount is not None else "an unknown file system"
