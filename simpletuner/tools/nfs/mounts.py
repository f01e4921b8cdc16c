"""Check `mount`: is the filesystem of a path shared between machines, and do its mount options suit a run?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from simpletuner.system.files.mounts import LOCAL, OBJECT_STORES, Mount, find_mount, read_mounts
from simpletuner.tools.nfs.results import OTHER_FILESYSTEM, Finding, failed, format_ranks, passed, warned

if TYPE_CHECKING:
    from simpletuner.tools.nfs.rendezvous import Node

NFS = ("nfs", "nfs4")
SHARED = (
    {"nfs": "NFS 3", "nfs4": "NFS 4", "lustre": "Lustre", "ceph": "CephFS", "fuse.ceph": "CephFS (fuse)"}
    | {"fuse.ceph-fuse": "CephFS (fuse)", "beegfs": "BeeGFS", "gpfs": "IBM Storage Scale (GPFS)", "wekafs": "WEKA"}
    | {"ocfs2": "OCFS2", "gfs2": "GFS2", "fuse.glusterfs": "GlusterFS", "fuse.juicefs": "JuiceFS"}
    | {"cifs": "SMB", "smb3": "SMB", "fuse.sshfs": "sshfs", **OBJECT_STORES}
)
"""Filesystems whose files all machines see, with their common names."""
OVER_OTHERS = {"fuse": "FUSE (bindfs or another)", "fuse.bindfs": "bindfs", "fuse.mergerfs": "mergerfs"}
OVER_OTHERS |= {"fuse.gocryptfs": "gocryptfs", "fuse.encfs": "EncFS", "fuse.cryfs": "CryFS"}
"""Filesystems over others, whose files are shared if those below are, with their names."""
OBJECTS = "keeps files as objects: rename is no single step there, and locks and appends may be missing"
ON_THIS_HOST = "keeps files on the host of this virtual machine: shared only between machines on that host"
# Filesystems that may not suit a run, and why.
UNSUITABLE = {
    "fuse.sshfs": "keeps locks on one node only, lists files up to 20 s late, and is slow for checkpoints",
    **dict.fromkeys(OBJECT_STORES, OBJECTS),
    **dict.fromkeys(("9p", "virtiofs"), ON_THIS_HOST),
}
LOCAL_LOCKS = "locks hold on this node only"
TWO_RUNS = f"{LOCAL_LOCKS}, so two runs could share the folder"
# Filesystems; options, the first set one is reported; its effect; the option to mount with instead.
RISKY_OPTIONS = (
    (NFS, ("soft", "softerr"), "a slow server makes writes fail, and a checkpoint may be damaged", "hard"),
    (NFS, ("nolock", "local_lock=all", "local_lock=flock"), TWO_RUNS, ""),
    (("lustre",), ("localflock",), TWO_RUNS, "flock"),
    (("cifs", "smb3"), ("nobrl",), LOCAL_LOCKS, ""),
)
LOCKS_FIXES = (
    dict.fromkeys(NFS, "mount without `nolock` and `local_lock` (NFS 3 also needs: sudo systemctl start rpc-statd)")
    | {"lustre": "mount with `flock`"}
    | dict.fromkeys(("cifs", "smb3"), "mount without `nobrl`")
    | dict.fromkeys(
        ("fuse.sshfs", *OBJECT_STORES), f"its locks hold on one node only, however it is mounted: {OTHER_FILESYSTEM}"
    )
)
"""The way to locks that all nodes share, by filesystem."""
# Options that the client negotiates with the server, not those of /etc/fstab.
NEGOTIATED = re.compile(r"(addr|clientaddr|mountaddr|mountport|mountproto|mountvers|local_lock|namlen|port)=")
EFS_SOURCE = re.compile(r"(fs-[0-9a-f]+)(\.efs\.[a-z0-9.-]+)?:/")


class MountScope(StrEnum):
    """Visibility of a filesystem's files to other nodes."""

    SHARED = "shared"
    LOCAL = "local"
    UNKNOWN = "unknown"


def mount_of_node(node: Node) -> Mount | None:
    return find_mount(PurePosixPath(node.path), read_mounts(node.mountinfo))


def name_of(mount: Mount) -> str:
    """Return the common name of a mount's filesystem, with the version of NFS."""
    if mount.fstype not in NFS:
        return (SHARED | OVER_OTHERS).get(mount.fstype, mount.fstype)
    version = mount.value_of("vers") or ("3" if mount.fstype == "nfs" else "4")
    through_tunnel = mount.source.startswith("127.0.0.1:/") and mount.value_of("port")  # of EFS's mount helper
    is_efs = through_tunnel or EFS_SOURCE.match(mount.source)
    return f"Amazon EFS (NFS {version})" if is_efs else f"NFS {version}"


def scope_of(mount: Mount | None) -> MountScope:
    fstype = mount.fstype if mount else ""
    return MountScope.LOCAL if fstype in LOCAL else MountScope.SHARED if fstype in SHARED else MountScope.UNKNOWN


def server_of(mount: Mount) -> str:
    """Machine that serves a mount; empty where there is none. mergerfs names its disks: `/disk1:/disk2`."""
    is_served = mount.fstype in SHARED.keys() - OBJECT_STORES.keys() and ":" in mount.source
    return mount.source.partition(":")[0] if is_served else ""


def fstype_of(node: Node) -> str:
    mount = mount_of_node(node)
    return mount.fstype if mount is not None else ""


def locks_fix(fstype: str) -> tuple[str, ...]:
    """Return the steps that give a filesystem locks shared by all nodes."""
    if fstype in LOCKS_FIXES:
        return (LOCKS_FIXES[fstype],)
    return (f"NFS: {LOCKS_FIXES['nfs']}", f"Lustre: {LOCKS_FIXES['lustre']}. Others: {OTHER_FILESYSTEM}")


def mount_warnings(mount: Mount) -> Iterator[tuple[str, str]]:
    if mount.fstype in UNSUITABLE:
        yield f"{name_of(mount)} {UNSUITABLE[mount.fstype]}", OTHER_FILESYSTEM
    for fstypes, options, effect, instead in RISKY_OPTIONS:
        found = next((option for option in options if option in mount.options), "")
        if found and mount.fstype in fstypes:
            yield f"`{found}`: {effect}", fstab_line(mount, found, instead)
    if mount.fstype == "lustre" and not {"flock", "localflock"} & set(mount.options):
        yield (
            "no `flock`: locks are refused, and nothing keeps two runs out of one folder",
            fstab_line(mount, add="flock"),
        )


def fstab_line(mount: Mount, drop: str = "", add: str = "") -> str:
    kept = [option for option in mount.options if option not in (drop, add) and not NEGOTIATED.match(option)]
    options = ",".join(filter(None, [*kept, add, "_netdev"]))
    fields = (mount.source, str(mount.point), mount.fstype, options)
    # fstab(5) separates fields by blanks, and writes one within a field as \040.
    line = " ".join(field.replace(" ", "\\040") for field in fields)
    return f"in /etc/fstab: {line} 0 0   # then: sudo umount {mount.point}; sudo mount {mount.point}"


def recipe(path: str, server: str, node_rank: int) -> tuple[str, ...]:
    """Commands that share a folder of node 0 by NFS, this node's part first; `server` may be empty."""
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


def check_mount(node: Node, mount: Mount | None, others: Mapping[int, str]) -> Finding:
    """Check `mount`; `others` are the reaches of the mounts of nodes that see our files."""
    if mount is None:
        return warned("mount", f"no mount is listed for {node.path} in {node.mountinfo}", f"findmnt -T {node.path}")
    sentence, reach, server = describe(mount), scope_of(mount), server_of(mount)
    values: dict[str, Any] = {"mount_point": str(mount.point), "fstype": mount.fstype, "kind": name_of(mount)}
    values |= {"reach": reach, "source": mount.source, "server": server, "options": list(mount.options)}
    if "ro" in mount.options:
        fix = f"sudo mount -o remount,rw {mount.point}   # and `rw` in /etc/fstab, and in the server's /etc/exports"
        return failed("mount", f"{sentence}: read-only", fix, **values)
    if reach is MountScope.LOCAL and node.nodes > 1:
        # right on one node only: the one that serves it to the others
        served = [rank for rank, reached in others.items() if reached == MountScope.SHARED]
        if served:
            return passed("mount", f"{sentence}, which this node serves to {format_ranks(served)}", **values)
        why = f"{sentence}, a local filesystem: {node.nodes} nodes cannot share it"
        # Most often it is the wrong folder: the cluster has a shared one.
        other = "give a folder that all nodes share: --path here, output_dir for the run; or share this one:"
        return failed("mount", why, other, *recipe(str(node.path), node.address, node.rank), **values)
    if found := list(mount_warnings(mount)):
        why = f"{sentence}; " + "; ".join(reason for reason, _ in found)
        return warned("mount", why, *dict.fromkeys(fix for _, fix in found), **values)
    if mount.fstype in OVER_OTHERS and node.nodes > 1:
        why = f"{sentence}, a filesystem over another one, shared if that is: trust the checks below"
        return warned("mount", why, f"findmnt -T {node.path}", **values)
    if reach is MountScope.UNKNOWN and node.nodes > 1:
        why = f"{sentence}, a filesystem that this check does not know: trust the checks below"
        return warned("mount", why, f"findmnt -T {node.path}", **values)
    return passed("mount", sentence, **values)


def describe(mount: Mount) -> str:
    """Mount point, type, server and the options that matter here, in words."""
    source = f" from {mount.source}" if server_of(mount) or mount.source.startswith("/") else ""
    bound = f" (its folder {mount.root})" if mount.root != "/" and mount.source.startswith("/") else ""
    words = ("rw", "ro", "hard", "soft", "softerr", "nolock", "flock", "localflock", "noac", "sync", "nobrl")
    options = ", ".join(option for option in mount.options if option in words)
    return f"{mount.point} is {name_of(mount)}{source}{bound}, {options}"
