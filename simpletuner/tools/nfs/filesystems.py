"""Check `mount`: is the filesystem shared between machines, and do its mount options suit a run?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from simpletuner.tools.nfs.mounts import Mount, find_mount, parse_mountinfo
from simpletuner.tools.nfs.rendezvous import Node
from simpletuner.tools.nfs.results import Finding, failed, format_ranks, passed, warned


class Reach(StrEnum):
    """Who sees the files of a filesystem."""

    SHARED = "shared"
    LOCAL = "local"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Filesystem:
    """A filesystem: its common name, who sees its files, and why it may not suit a run."""

    name: str
    reach: Reach
    caution: str = ""


OBJECTS = "keeps files as objects: rename is no single step there, and locks and appends may be missing"
ON_THIS_HOST = "keeps files on the host of this virtual machine: shared only between machines on that host"

OTHER_FILESYSTEM = "use NFS 4, Lustre or CephFS for output_dir"

FILESYSTEMS: dict[str, Filesystem] = {
    "nfs": Filesystem("NFS 3", Reach.SHARED),
    "nfs4": Filesystem("NFS 4", Reach.SHARED),
    "lustre": Filesystem("Lustre", Reach.SHARED),
    "ceph": Filesystem("CephFS", Reach.SHARED),
    "fuse.ceph": Filesystem("CephFS (fuse)", Reach.SHARED),
    "fuse.ceph-fuse": Filesystem("CephFS (fuse)", Reach.SHARED),
    "beegfs": Filesystem("BeeGFS", Reach.SHARED),
    "gpfs": Filesystem("IBM Storage Scale (GPFS)", Reach.SHARED),
    "wekafs": Filesystem("WEKA", Reach.SHARED),
    "ocfs2": Filesystem("OCFS2", Reach.SHARED),
    "gfs2": Filesystem("GFS2", Reach.SHARED),
    "fuse.glusterfs": Filesystem("GlusterFS", Reach.SHARED),
    "fuse.juicefs": Filesystem("JuiceFS", Reach.SHARED),
    "cifs": Filesystem("SMB", Reach.SHARED),
    "smb3": Filesystem("SMB", Reach.SHARED),
    "fuse.sshfs": Filesystem("sshfs", Reach.SHARED, "keeps locks on one node only, and is slow for checkpoints"),
    "fuse.s3fs": Filesystem("s3fs", Reach.SHARED, OBJECTS),
    "fuse.rclone": Filesystem("rclone", Reach.SHARED, OBJECTS),
    "fuse.gcsfuse": Filesystem("gcsfuse", Reach.SHARED, OBJECTS),
    "fuse.goofys": Filesystem("goofys", Reach.SHARED, OBJECTS),
    "fuse.mountpoint-s3": Filesystem("Mountpoint for S3", Reach.SHARED, OBJECTS),
    "9p": Filesystem("9p", Reach.UNKNOWN, ON_THIS_HOST),
    "virtiofs": Filesystem("virtiofs", Reach.UNKNOWN, ON_THIS_HOST),
}
LOCAL = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "fuse.fuse-overlayfs"),
    *("tmpfs", "ramfs", "rootfs", "devtmpfs", "squashfs", "erofs", "iso9660"),
    *("vfat", "exfat", "ntfs", "ntfs3", "fuseblk"),
)

EFS_SOURCE = re.compile(r"(fs-[0-9a-f]+)(\.efs\.[a-z0-9.-]+)?:/")


def filesystem_of(mount: Mount) -> Filesystem:
    if mount.fstype in LOCAL:
        return Filesystem(mount.fstype, Reach.LOCAL)
    filesystem = FILESYSTEMS.get(mount.fstype, Filesystem(mount.fstype, Reach.UNKNOWN))
    if mount.fstype in ("nfs", "nfs4"):
        version = mount.value_of("vers") or ("3" if mount.fstype == "nfs" else "4")
        return replace(filesystem, name=f"Amazon EFS (NFS {version})" if is_efs(mount) else f"NFS {version}")
    return filesystem


def is_efs(mount: Mount) -> bool:
    """Recognize Amazon EFS, mounted by name or through the TLS tunnel of its mount helper."""
    through_tunnel = mount.source.startswith("127.0.0.1:/") and bool(mount.value_of("port"))
    return bool(EFS_SOURCE.match(mount.source)) or through_tunnel


def server_of(mount: Mount) -> str:
    """Return the machine that serves a mount; empty where there is none."""
    return mount.source.partition(":")[0] if ":" in mount.source else ""


def cautions(mount: Mount, filesystem: Filesystem) -> Iterator[tuple[str, str]]:
    """Yield what may go wrong with a mount, each with its fix."""
    if filesystem.caution:
        yield f"{filesystem.name} {filesystem.caution}", OTHER_FILESYSTEM
    if mount.fstype in ("nfs", "nfs4"):
        yield from nfs_cautions(mount)
    if mount.fstype == "lustre":
        yield from lustre_cautions(mount)
    if mount.fstype in ("cifs", "smb3") and "nobrl" in mount.options:
        yield "`nobrl`: locks hold on this node only", fstab_line(mount, drop=("nobrl",))


def nfs_cautions(mount: Mount) -> Iterator[tuple[str, str]]:
    if soft := next((option for option in ("soft", "softerr") if option in mount.options), ""):
        why = f"`{soft}`: a slow server makes writes fail, and a checkpoint may be damaged"
        yield why, fstab_line(mount, drop=(soft,), add=("hard",))
    local = mount.value_of("local_lock")
    if "nolock" in mount.options or local in ("all", "flock"):
        said = "nolock" if "nolock" in mount.options else f"local_lock={local}"
        why = f"`{said}`: locks hold on this node only, so two runs could share the folder"
        yield why, fstab_line(mount, drop=("nolock", f"local_lock={local}"))


def lustre_cautions(mount: Mount) -> Iterator[tuple[str, str]]:
    if "localflock" in mount.options:
        why = "`localflock`: locks hold on this node only, so two runs could share the folder"
        yield why, fstab_line(mount, drop=("localflock",), add=("flock",))
    elif "flock" not in mount.options:
        yield "no `flock`: locks are refused, and a run cannot start", fstab_line(mount, add=("flock",))


def fstab_line(mount: Mount, drop: tuple[str, ...] = (), add: tuple[str, ...] = ()) -> str:
    """Return the line of /etc/fstab that mounts this with other options."""
    # /proc shows these as well, but the client negotiates them with the server
    negotiated = re.compile(r"(addr|clientaddr|mountaddr|mountport|mountproto|mountvers|local_lock|namlen|port)=")
    kept = [option for option in mount.options if option not in drop and not negotiated.match(option)]
    options = ",".join([*kept, *(option for option in add if option not in kept), "_netdev"])
    fields = (mount.source, str(mount.point), mount.fstype, options)
    line = " ".join(field.replace(" ", "\\040") for field in fields)
    return f"in /etc/fstab: {line} 0 0   # then: sudo umount {mount.point}; sudo mount {mount.point}"


def recipe(path: str, server: str, node_rank: int) -> tuple[str, ...]:
    """Return how to share a folder of node 0 by NFS, the part of this node first; `server` may be empty."""
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


def mount_of_node(node: Node) -> Mount | None:
    if not node.mountinfo.exists():  # not Linux
        return None
    text = node.mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    return find_mount(PurePosixPath(node.path), parse_mountinfo(text))


def reach_of(mount: Mount | None) -> Reach:
    return filesystem_of(mount).reach if mount else Reach.UNKNOWN


def check_mount(node: Node, mount: Mount | None, others: Mapping[int, str]) -> Finding:
    """Check `mount`; `others` are the reaches of the mounts of nodes that see our files."""
    if mount is None:
        return warned("mount", f"no mount is listed for {node.path} in {node.mountinfo}", f"findmnt -T {node.path}")
    filesystem, values = filesystem_of(mount), mount_values(mount)
    sentence = describe(mount)
    if "ro" in mount.options:
        fix = f"sudo mount -o remount,rw {mount.point}   # and `rw` in /etc/fstab, and in the server's /etc/exports"
        return failed("mount", f"{sentence}: read-only", fix, **values)
    if filesystem.reach is Reach.LOCAL and node.nodes > 1:
        # right on one node only: the one that serves it to the others
        served = [rank for rank, reach in others.items() if reach == Reach.SHARED]
        if served:
            return passed("mount", f"{sentence}, which this node serves to {format_ranks(served)}", **values)
        why = f"{sentence}, a local filesystem: {node.nodes} nodes cannot share it"
        return failed("mount", why, *recipe(str(node.path), node.address, node.rank), **values)
    if found := list(cautions(mount, filesystem)):
        why = f"{sentence}; " + "; ".join(reason for reason, _ in found)
        return warned("mount", why, *dict.fromkeys(fix for _, fix in found), **values)
    if filesystem.reach is Reach.UNKNOWN and node.nodes > 1:
        why = f"{sentence}, a filesystem that this check does not know: trust the checks below"
        return warned("mount", why, f"findmnt -T {node.path}", **values)
    return passed("mount", sentence, **values)


def describe(mount: Mount) -> str:
    """Describe what is mounted where, from which server, with the options that matter here."""
    source = f" from {mount.source}" if server_of(mount) or mount.source.startswith("/") else ""
    bound = f" (its folder {mount.root})" if mount.root != "/" and mount.source.startswith("/") else ""
    words = ("rw", "ro", "hard", "soft", "softerr", "nolock", "flock", "localflock", "noac", "sync", "nobrl")
    options = ", ".join(option for option in mount.options if option in words)
    return f"{mount.point} is {filesystem_of(mount).name}{source}{bound}, {options}"


def mount_values(mount: Mount) -> dict[str, Any]:
    filesystem = filesystem_of(mount)
    return {
        "mount_point": str(mount.point),
        "fstype": mount.fstype,
        "kind": filesystem.name,
        "reach": str(filesystem.reach),
        "source": mount.source,
        "server": server_of(mount),
        "options": list(mount.options),
    }
