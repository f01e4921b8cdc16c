"""Whether the mount under the path is one that all nodes can share, judged once the nodes know of each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from simpletuner.tools.nfs.filesystems import Reach, cautions, kind_of, recipe, server_of
from simpletuner.tools.nfs.findings import Finding, failed, passed, ranks_in_words, warned
from simpletuner.tools.nfs.mounts import Mount, mount_of, parsed
from simpletuner.tools.nfs.node import Node


def mounted(node: Node) -> Mount | None:
    """Return the mount that the path lies on."""
    if not node.mountinfo.exists():  # not Linux
        return None
    text = node.mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    return mount_of(PurePosixPath(node.path), parsed(text))


def reach_of(mount: Mount | None) -> Reach:
    """Return who sees the files of a mount."""
    return kind_of(mount).reach if mount else Reach.UNKNOWN


def judged(node: Node, mount: Mount | None, others: Mapping[int, str]) -> Finding:
    """Return what is to be said of the mount; `others` are the reaches that nodes which see our files told.

    A local filesystem is right on one node of several: the one that serves it to the others.
    """
    if mount is None:
        return warned("mount", f"no mount is listed for {node.path} in {node.mountinfo}", f"findmnt -T {node.path}")
    kind, values = kind_of(mount), described(mount)
    sentence = in_words(mount)
    if "ro" in mount.options:
        fix = f"sudo mount -o remount,rw {mount.point}   # and `rw` in /etc/fstab, and in the server's /etc/exports"
        return failed("mount", f"{sentence}: read-only", fix, **values)
    if kind.reach is Reach.LOCAL and node.nodes > 1:
        served = [rank for rank, reach in others.items() if reach == Reach.SHARED]
        if served:
            return passed("mount", f"{sentence}, which this node serves to {ranks_in_words(served)}", **values)
        why = f"{sentence}, a local filesystem: {node.nodes} nodes cannot share it"
        return failed("mount", why, *recipe(str(node.path), node.address, node.rank), **values)
    said = list(cautions(mount, kind)) if node.nodes > 1 or kind.reach is not Reach.LOCAL else []
    if said:
        why = f"{sentence}; " + "; ".join(reason for reason, _ in said)
        return warned("mount", why, *dict.fromkeys(fix for _, fix in said), **values)
    if kind.reach is Reach.UNKNOWN and node.nodes > 1:
        why = f"{sentence}, a filesystem that this check does not know: trust the checks below"
        return warned("mount", why, f"findmnt -T {node.path}", **values)
    return passed("mount", sentence, **values)


def in_words(mount: Mount) -> str:
    """Return what lies where, from whom."""
    source = f" from {mount.source}" if server_of(mount) or mount.source.startswith("/") else ""
    bound = f" (its folder {mount.root})" if mount.root != "/" and mount.source.startswith("/") else ""
    return f"{mount.point} is {kind_of(mount).name}{source}{bound}, {', '.join(telling(mount))}"


def telling(mount: Mount) -> list[str]:
    """Return the options that matter here."""
    words = ("rw", "ro", "hard", "soft", "softerr", "nolock", "flock", "localflock", "noac", "sync", "nobrl")
    return [option for option in mount.options if option in words]


def described(mount: Mount) -> dict[str, Any]:
    """Return a mount for scripts."""
    kind = kind_of(mount)
    return {
        "mount_point": str(mount.point),
        "fstype": mount.fstype,
        "kind": kind.name,
        "reach": str(kind.reach),
        "source": mount.source,
        "server": server_of(mount),
        "options": list(mount.options),
    }
