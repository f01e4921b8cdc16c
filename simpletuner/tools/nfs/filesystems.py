"""What a mount promises: shared between machines or local, and which of its options a run should know of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from simpletuner.tools.nfs.mounts import Mount


class Reach(StrEnum):
    """Who sees the files of a filesystem."""

    SHARED = "shared"
    LOCAL = "local"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Kind:
    """A filesystem as people call it, who sees its files, and why it may disappoint a run."""

    name: str
    reach: Reach
    caution: str = ""


OBJECTS = "keeps files as objects: rename is no single step there, and locks and appends may be missing"
ON_THIS_HOST = "keeps files on the host of this virtual machine: shared only between machines on that host"

OTHER_FILESYSTEM = "use NFS 4, Lustre or CephFS for output_dir"

KINDS: dict[str, Kind] = {
    "nfs": Kind("NFS 3", Reach.SHARED),
    "nfs4": Kind("NFS 4", Reach.SHARED),
    "lustre": Kind("Lustre", Reach.SHARED),
    "ceph": Kind("CephFS", Reach.SHARED),
    "fuse.ceph": Kind("CephFS (fuse)", Reach.SHARED),
    "fuse.ceph-fuse": Kind("CephFS (fuse)", Reach.SHARED),
    "beegfs": Kind("BeeGFS", Reach.SHARED),
    "gpfs": Kind("IBM Storage Scale (GPFS)", Reach.SHARED),
    "wekafs": Kind("WEKA", Reach.SHARED),
    "ocfs2": Kind("OCFS2", Reach.SHARED),
    "gfs2": Kind("GFS2", Reach.SHARED),
    "fuse.glusterfs": Kind("GlusterFS", Reach.SHARED),
    "fuse.juicefs": Kind("JuiceFS", Reach.SHARED),
    "cifs": Kind("SMB", Reach.SHARED),
    "smb3": Kind("SMB", Reach.SHARED),
    "fuse.sshfs": Kind("sshfs", Reach.SHARED, "keeps locks on one node only, and is slow for checkpoints"),
    "fuse.s3fs": Kind("s3fs", Reach.SHARED, OBJECTS),
    "fuse.rclone": Kind("rclone", Reach.SHARED, OBJECTS),
    "fuse.gcsfuse": Kind("gcsfuse", Reach.SHARED, OBJECTS),
    "fuse.goofys": Kind("goofys", Reach.SHARED, OBJECTS),
    "fuse.mountpoint-s3": Kind("Mountpoint for S3", Reach.SHARED, OBJECTS),
    "9p": Kind("9p", Reach.UNKNOWN, ON_THIS_HOST),
    "virtiofs": Kind("virtiofs", Reach.UNKNOWN, ON_THIS_HOST),
}
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs", "ramfs", "rootfs")
LOCAL += (
    "squashfs",
    "erofs",
    "vfat",
    "exfat",
    "ntfs",
    "ntfs3",
    "fuseblk",
    "iso9660",
    "fuse.fuse-overlayfs",
    "devtmpfs",
)

EFS_SOURCE = re.compile(r"(fs-[0-9a-f]+)(\.efs\.[a-z0-9.-]+)?:/")


def kind_of(mount: Mount) -> Kind:
    """Return what a mount is; an NFS mount's version is read from its options."""
    if mount.fstype in LOCAL:
        return Kind(mount.fstype, Reach.LOCAL)
    kind = KINDS.get(mount.fstype, Kind(mount.fstype, Reach.UNKNOWN))
    if mount.fstype in ("nfs", "nfs4"):
        version = mount.value_of("vers") or ("3" if mount.fstype == "nfs" else "4")
        return replace(kind, name=f"Amazon EFS (NFS {version})" if is_efs(mount) else f"NFS {version}")
    return kind


def is_efs(mount: Mount) -> bool:
    """Return whether an NFS mount is Amazon's, mounted by name, or through the tunnel of its mount helper."""
    through_tunnel = mount.source.startswith("127.0.0.1:/") and bool(mount.value_of("port"))
    return bool(EFS_SOURCE.match(mount.source)) or through_tunnel


def server_of(mount: Mount) -> str:
    """Return the machine that serves a mount, or nothing for what has none."""
    return mount.source.partition(":")[0] if ":" in mount.source else ""


def cautions(mount: Mount, kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield what a run should know about a mount's options, each with what mends it."""
    if kind.caution:
        yield f"{kind.name} {kind.caution}", OTHER_FILESYSTEM
    if mount.fstype in ("nfs", "nfs4"):
        yield from nfs_cautions(mount)
    if mount.fstype == "lustre":
        yield from lustre_cautions(mount)
    if mount.fstype in ("cifs", "smb3") and "nobrl" in mount.options:
        yield "`nobrl`: locks hold on this node only", fstab_line(mount, drop=("nobrl",))


def nfs_cautions(mount: Mount) -> Iterator[tuple[str, str]]:
    """Yield what is risky in an NFS mount's options."""
    if soft := next((option for option in ("soft", "softerr") if option in mount.options), ""):
        why = f"`{soft}`: a slow server makes writes fail, and a checkpoint may be damaged"
        yield why, fstab_line(mount, drop=(soft,), add=("hard",))
    local = mount.value_of("local_lock")
    if "nolock" in mount.options or local in ("all", "flock"):
        said = "nolock" if "nolock" in mount.options else f"local_lock={local}"
        why = f"`{said}`: locks hold on this node only, so two runs could share the folder"
        yield why, fstab_line(mount, drop=("nolock", f"local_lock={local}"))


def lustre_cautions(mount: Mount) -> Iterator[tuple[str, str]]:
    """Yield what a Lustre mount lacks for locks."""
    if "localflock" in mount.options:
        why = "`localflock`: locks hold on this node only, so two runs could share the folder"
        yield why, fstab_line(mount, drop=("localflock",), add=("flock",))
    elif "flock" not in mount.options:
        yield "no `flock`: locks are refused, and a run cannot start", fstab_line(mount, add=("flock",))


def fstab_line(mount: Mount, drop: tuple[str, ...] = (), add: tuple[str, ...] = ()) -> str:
    """Return the line of /etc/fstab that mounts this with other options; the client fills in what it negotiates."""
    negotiated = re.compile(r"(addr|clientaddr|mountaddr|mountport|mountproto|mountvers|local_lock|namlen|port)=")
    kept = [option for option in mount.options if option not in drop and not negotiated.match(option)]
    options = ",".join([*kept, *(option for option in add if option not in kept), "_netdev"])
    fields = (mount.source, str(mount.point), mount.fstype, options)
    line = " ".join(field.replace(" ", "\\040") for field in fields)
    return f"in /etc/fstab: {line} 0 0   # then: sudo umount {mount.point}; sudo mount {mount.point}"


def recipe(path: str, server: str, node_rank: int) -> tuple[str, ...]:
    """Return how to share a folder of node 0 by NFS, a node's own part first; `server` is its address or nothing."""
    numbers = server.split(".")
    is_ipv4 = len(numbers) == 4 and all(number.isdigit() for number in numbers)
    clients = ".".join([*numbers[:3], "0/24"]) if is_ipv4 else "SUBNET/24"
    node_0 = server or "NODE0"
    serve = (
        f"on node 0: sudo apt install nfs-kernel-server; mkdir -p {path}",
        f"on node 0: echo '{path} {clients}(rw,sync,no_subtree_check)' | sudo tee -a /etc/exports; sudo exportfs -ra",
    )
    mount = (
        f"on the others: sudo apt install nfs-common; sudo mkdir -p {path}; sudo mount {node_0}:{path} {path}",
        f"to keep it, in their /etc/fstab: {node_0}:{path} {path} nfs defaults,_netdev 0 0",
    )
    return (*serve, *mount) if node_rank == 0 else (*mount, *serve)
