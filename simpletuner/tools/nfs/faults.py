"""What a filesystem's error number means for a run, and what mends it."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def explained(error: OSError, path: Path) -> tuple[str, str]:
    """Return a sentence and a remedy for an error of the filesystem."""
    number = error.errno or 0
    name = errno.errorcode.get(number, "an error")
    sentence, fix = MEANINGS.get(
        number, (f"{error.strerror or error} at {{path}}", "sudo dmesg | tail  # and the file server's log")
    )
    who = f"{os.geteuid()}:{os.getegid()}"
    return f"{sentence.format(path=path)} ({name}, uid:gid {who})", fix.format(path=path, who=who)


DENIED = (
    "no permission to write in {path}",
    "sudo chown {who} {path}   # on the file server, if root is squashed here",
)
LOST = (
    "the file server no longer knows {path}: it was exported anew or replaced",
    "sudo umount -l {path}; sudo mount {path}",
)
NO_LOCKS = (
    "this mount has no working locks at {path}",
    "remount with locks: NFS 3 without `nolock` and with rpc.statd running, NFS 4, or Lustre with `flock`",
)

MEANINGS: dict[int, tuple[str, str]] = {
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: (
        "{path} is read-only",
        "sudo mount -o remount,rw {path}   # and `rw` in /etc/exports of the file server",
    ),
    errno.ENOSPC: ("no room is left at {path}", "df -h {path}; df -i {path}   # then remove what is not needed"),
    errno.EDQUOT: ("your quota at {path} is used up", "quota -s   # on Lustre: lfs quota -h {path}"),
    errno.ESTALE: LOST,
    errno.EIO: (
        "the file server failed to answer for {path}",
        "sudo dmesg | tail   # and look at the file server's health",
    ),
    errno.ETIMEDOUT: ("the file server did not answer in time for {path}", "ping the file server; look at its health"),
    errno.ENOTCONN: ("the program behind this mount has ended at {path}", "fusermount -u {path}; then mount it again"),
    errno.ENOTDIR: ("{path}, or a folder above it, is a file", "give --path=FOLDER"),
    errno.ENOLCK: NO_LOCKS,
    errno.ENOSYS: NO_LOCKS,
    errno.EOPNOTSUPP: NO_LOCKS,
}
