"""Whether a lock holds on all nodes: node 0 takes one, the others must be refused, and get it after its release.

The lock is flock(2), which keeps two runs out of one folder (`files.sole_user_of`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simpletuner.tools.nfs.faults import explained
from simpletuner.tools.nfs.findings import Finding, failed, passed, ranks_in_words
from simpletuner.tools.nfs.meeting import Meeting
from simpletuner.tools.nfs.node import Node

RELEASE_SECONDS = 5.0
LOCKS_FIX = (
    "NFS: mount without `nolock` and `local_lock` (NFS 3 also needs: sudo systemctl start rpc-statd)",
    "Lustre: mount with `flock`. Others: use NFS 4, Lustre or CephFS for output_dir",
)


def lock(node: Node, meeting: Meeting) -> Finding:
    """Return whether all nodes respect one lock."""
    path = meeting.place.own(0, "lock")
    if node.rank == 0:
        path.touch()
        path.chmod(0o666)
    meeting.gather("start")
    part = hold(node, meeting, path) if node.rank == 0 else contend(node, meeting, path)
    return verdict_on_lock(node, path, meeting.gather("result", part))


def hold(node: Node, meeting: Meeting, path: Path) -> dict[str, Any]:
    """Take the lock, let the others try, release it, and return how that went."""
    with opened(path) as file, opened(path) as second:
        number = try_lock(node, file)
        meeting.post("held", number)
        if number:
            return {"error": number, "tried": number, "seconds": None}
        meeting.wait("tried")
        tried_again = try_lock(node, second) if node.is_alone else errno.EWOULDBLOCK
        node.flock(file, fcntl.LOCK_UN)
        meeting.post("released")
        return {"error": 0, "tried": tried_again, "seconds": seconds_until_locked(node, meeting, second)}


def contend(node: Node, meeting: Meeting, path: Path) -> dict[str, Any]:
    """Try the lock while node 0 holds it and after its release, and return how that went."""
    with opened(path) as file:
        if number := meeting.wait("held", [0])[0]:
            return {"error": 0, "tried": number, "seconds": None}
        tried = try_lock(node, file)
        if tried == 0:
            node.flock(file, fcntl.LOCK_UN)
        meeting.post("tried")
        meeting.wait("released", [0])
        return {"error": 0, "tried": tried, "seconds": seconds_until_locked(node, meeting, file)}


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for locks: NFS gives exclusive ones only to writers."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(node: Node, descriptor: int) -> int:
    """Return 0 when the lock was obtained, else the error's number."""
    try:
        node.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def seconds_until_locked(node: Node, meeting: Meeting, descriptor: int) -> float | None:
    """Return how long it took to obtain the lock that nobody keeps any more; None if it never came."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < RELEASE_SECONDS:
        number = try_lock(node, descriptor)
        if number == 0:
            node.flock(descriptor, fcntl.LOCK_UN)
            return seconds
        if number not in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        meeting.pause(0.01)
    return None


def verdict_on_lock(node: Node, path: Path, parts: Mapping[int, Mapping[str, Any]]) -> Finding:
    """Return what all nodes found, the most telling first."""
    refused = (errno.EWOULDBLOCK, errno.EACCES)
    unable = {rank: part["error"] or part["tried"] for rank, part in parts.items()}
    unable = {rank: number for rank, number in unable.items() if number not in (0, *refused)}
    values = {"obtained_seconds": parts[node.rank]["seconds"]}
    if unable:
        rank, number = min(unable.items())
        sentence, fix = explained(OSError(number, os.strerror(number)), path.parent.parent)
        return failed("lock", f"node {rank}: {sentence}", fix, **values)
    if parts[0]["error"]:
        return failed("lock", "node 0 could not take a lock on a new file: another process holds it", *LOCKS_FIX)
    if ignored := [rank for rank, part in parts.items() if part["tried"] == 0]:
        sentence = f"{ranks_in_words(ignored)} got the lock that node 0 was holding: locks are not shared"
        return failed("lock", sentence, *LOCKS_FIX, **values)
    if late := [rank for rank, part in parts.items() if part["seconds"] is None]:
        sentence = f"{ranks_in_words(late)} did not get the lock within {RELEASE_SECONDS:g} s of its release"
        return failed("lock", sentence, *LOCKS_FIX, **values)
    who = "a second opener was" if node.is_alone else "the others were"
    return passed("lock", f"flock held by node 0: {who} refused, and obtained it after its release", **values)
