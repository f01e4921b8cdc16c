"""The result of a check: a status, one sentence with the numbers, and the command that helps."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

CHECKS = ("mount", "write", "see", "rename", "lock", "identity", "clock", "space", "port")
"""Every check, in the order of the table."""


class Status(StrEnum):
    """Status of a check, in order of severity; `skip`: it was not requested, or not possible."""

    SKIP = "skip"
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """A check's result; `values` are the sentence's numbers for scripts, `fix` what to type or change."""

    check: str
    status: Status
    seen: str
    fix: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def parse_finding(value: Mapping[str, Any]) -> Finding:
    return Finding(value["check"], Status(value["status"]), value["seen"], tuple(value["fix"]), value["values"])


def worst(findings: Iterable[Finding]) -> Status:
    """Return the most severe status; `pass` when all were skipped."""
    return max((finding.status for finding in findings), key=list(Status).index, default=Status.PASS)


def make_finding(status: Status, check: str, seen: str, *fix: str, **values: object) -> Finding:
    return Finding(check, status, seen, fix, values)


passed = partial(make_finding, Status.PASS)
skipped = partial(make_finding, Status.SKIP)
warned = partial(make_finding, Status.WARN)
"""A run works with this, but not as well as it could."""
failed = partial(make_finding, Status.FAIL)
"""This stops or damages a run."""


def format_duration(seconds: float) -> str:
    if seconds < 0.001:
        return "under 1 ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def format_ranks(ranks: Iterable[int]) -> str:
    """Format `node 1`, or `nodes 1, 2`."""
    listed = sorted(ranks)
    return f"node{'' if len(listed) == 1 else 's'} {', '.join(map(str, listed))}"


OTHER_FILESYSTEM = "use NFS 4, Lustre or CephFS for output_dir"
DENIED = "no permission to write in {path}", "sudo chown {user} {path}   # on the file server, if root is squashed here"
NO_LOCKS = (
    "this mount has no working locks at {path}",
    "remount with locks: NFS 3 without `nolock` and with rpc.statd running, NFS 4, or Lustre with `flock`",
)
READ_ONLY = "{path} is read-only", "sudo mount -o remount,rw {path}   # and `rw` in /etc/exports of the file server"
SERVER_FAILED = "the file server failed to answer for {path}"
STALE = "the file server no longer knows {path}: it was exported again or replaced"
ERRNO_MESSAGES: dict[int, tuple[str, str]] = {
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: READ_ONLY,
    errno.ENOSPC: ("no room is left at {path}", "df -h {path}; df -i {path}   # then remove what is not needed"),
    errno.EDQUOT: ("your quota at {path} is used up", "quota -s   # on Lustre: lfs quota -h {path}"),
    errno.ESTALE: (STALE, "sudo umount -l {path}; sudo mount {path}"),
    errno.EIO: (SERVER_FAILED, "sudo dmesg | tail   # and look at the file server's health"),
    errno.ETIMEDOUT: ("the file server did not answer in time for {path}", "ping the file server; look at its health"),
    errno.ENOTCONN: ("the program behind this mount has ended at {path}", "fusermount -u {path}; then mount it again"),
    errno.ENOTDIR: ("{path}, or a folder above it, is a file", "give --path=FOLDER"),
    **dict.fromkeys((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP), NO_LOCKS),
}
"""Meaning of the filesystem's errno values for a run, and the fix."""


def explain_errno(error: OSError, path: Path) -> tuple[str, str]:
    number, user = error.errno or 0, f"{os.geteuid()}:{os.getegid()}"
    unknown = "{reason} at {path}", "sudo dmesg | tail  # and the file server's log"
    known = {"path": path, "user": user, "reason": error.strerror or error}
    sentence, fix = (text.format(**known) for text in ERRNO_MESSAGES.get(number, unknown))
    return f"{sentence} ({errno.errorcode.get(number, 'an error')}, uid:gid {user})", fix
