"""Kinds of file systems, and what each can decide about the holder of a file: a table, as they were tried."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from simpletuner.system.files.mounts import Mount, find_mount, read_mounts

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
    """A kind of file system. `late_seconds`: how long one machine may not see what another has written to a file."""

    name: str
    is_local: bool = False
    """True for the disk of one machine."""
    has_shared_locks: bool = False
    """True where a lock of one machine is seen by others."""
    creates_exclusively: bool = True
    """True where one of two that create a file with O_EXCL is refused. On s3fs 1.90 and rclone 1.60 both won."""
    late_seconds: float = 60.0

    @property
    def keeps_locks_to_itself(self) -> bool:
        """Return whether it is known that machines share its files and not its locks."""
        return not self.is_local and not self.has_shared_locks and self.name != "unknown"


def file_system_at(folder: Path) -> FileSystem:
    """Return what is known of the file system of a folder, or of the nearest folder above it that is there."""
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
