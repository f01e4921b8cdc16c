"""Mounted file systems (/proc/self/mountinfo, proc(5)), the guarantees of their locks, and missing
operations.

`36 35 98:0 /root /mount/point rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2`.

Lustre without `-o flock` answers ENOSYS to flock(2), others EOPNOTSUPP; FUSE may answer EINVAL to fsync(2) of
a folder, and EEXIST to rename(2) onto an existing name. A run does without, and reports the loss.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """Mount point; `root` is the mounted part of its source, which shows bind mounts; `device` is `8:1`."""

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
    # macOS has no such file.
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
    # Walk down as the kernel does: of the mounts on the present one, the first on the way to the path. So
    # mounts that a later one hides are skipped, and of several on one point the topmost is found, whatever
    # the order of the file.
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


OBJECT_STORES = {f"fuse.{name}": name for name in ("s3fs", "rclone", "gcsfuse", "goofys")}
OBJECT_STORES["fuse.mountpoint-s3"] = "Mountpoint for S3"
LOCAL = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "fuse.fuse-overlayfs"),
    *("tmpfs", "ramfs", "rootfs", "devtmpfs", "squashfs", "erofs", "iso9660"),
    *("vfat", "exfat", "ntfs", "ntfs3", "fuseblk"),
)
CLUSTERED = ("ceph", "fuse.ceph", "fuse.ceph-fuse", "beegfs", "gpfs", "wekafs", "ocfs2", "gfs2")
SHARED_LOCKS = (*CLUSTERED, "nfs", "nfs4", "lustre", "fuse.glusterfs", "fuse.juicefs", "cifs", "smb3")
OWN_LOCKS = ("nolock", "local_lock=all", "local_lock=flock", "localflock", "nobrl")
"""Options of a mount that keeps locks on its machine."""


@dataclass(frozen=True)
class FileSystem:
    """A kind of file system. `late_seconds`: delay until a machine sees another's writes to a file."""

    name: str
    is_local: bool = False
    """True for the disk of one machine."""
    has_shared_locks: bool = False
    """True where a lock of one machine is seen by others."""
    creates_exclusively: bool = True
    """True if one of two that create a file with O_EXCL is refused. On s3fs 1.90 and rclone 1.60 both won."""
    late_seconds: float = 60.0

    @property
    def shows_locks(self) -> bool:
        """True if a lock is seen by all that see the file; elsewhere records tell of other machines."""
        return self.is_local or self.has_shared_locks


def file_system_at(folder: Path) -> FileSystem:
    """Known properties of a folder's file system, or of that of its nearest existing parent."""
    mount = find_mount(PurePosixPath(folder.resolve()), read_mounts())
    return file_system_of(mount) if mount is not None else FileSystem("local", is_local=True, late_seconds=0.0)


def file_system_of(mount: Mount) -> FileSystem:
    name = mount.fstype
    if name in LOCAL:
        return FileSystem(name, is_local=True, late_seconds=0.0)
    if name in OBJECT_STORES:
        late = 330.0 if name == "fuse.rclone" else 120.0  # it lists after 5 min, and writes after 5 s
        return FileSystem(OBJECT_STORES[name], creates_exclusively=False, late_seconds=late)
    if name == "fuse.sshfs":
        return FileSystem("sshfs", late_seconds=20.0)
    lacks_locks = bool(set(OWN_LOCKS) & set(mount.options)) or (name == "lustre" and "flock" not in mount.options)
    if name in SHARED_LOCKS and not lacks_locks:
        return FileSystem(name, has_shared_locks=True, late_seconds=20.0 if name in CLUSTERED else 60.0)
    return FileSystem(name if name in SHARED_LOCKS else "unknown")


NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
NO_REPLACING = (errno.EEXIST, errno.ENOSYS, errno.EOPNOTSUPP)
BY_RECORD = "a second run on another machine is found by the record in .lock, which takes longer"
# rclone with --vfs-cache-mode=full: a machine that has written a file keeps reading its own (1.60.1).
NOT_FOUND = "nothing finds a second run on another machine for certain, which rclone may never show here"
PROBE = ".simpletuner-probe-"
MAY_SAY = "`simpletuner nfs check --path FOLDER` says more; Lustre has locks when it is mounted with `flock`"


def sync(descriptor: int) -> None:
    """Have a file or folder written to its disk, if its file system can. Raises OSError if writing fails."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def rename_over(new: Path | str, name: Path | str, folder: int | None = None) -> None:
    """Give a file a name that another one may have, which it replaces. Raises OSError.

    At once, but where the file system cannot: a kill in between leaves both files under other names, and
    loses none.
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


def rename_to_free(new: Path | str, name: Path | str, folder: int | None = None) -> None:
    """Give a file a name that is free. Raises FileExistsError where it is not, and other OSError."""
    try:
        os.link(new, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        rename_over(new, name, folder)
    else:
        os.unlink(new, dir_fd=folder)


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
            elif not (system := file_system_at(folder)).shows_locks and system.name != "unknown":
                found.append(f"keeps file locks on one machine: {NOT_FOUND if system.name == 'rclone' else BY_RECORD}")
            if not can_sync(first, folder):
                found.append("cannot sync: a power failure may take the newest files, and a checkpoint with them")
            if not can_replace(second, first):
                found.append("cannot replace a file at once: a kill may leave one under a name that ends with .old")
        finally:
            for path in (first, second):
                path.unlink(missing_ok=True)
    return [f"{folder}, on {describe_file_system(folder)}, {what}" for what in found]


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


def describe_file_system(folder: Path) -> str:
    mount = find_mount(PurePosixPath(folder.resolve()), read_mounts())
    return f"{mount.fstype} at {mount.point}" if mount is not None else "an unknown file system"
