"""Checks of what saving and resuming rely on: writable files, atomic rename, and locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from simpletuner.system.numbers import count_noun
from simpletuner.tools.nfs.rendezvous import Node, Rendezvous
from simpletuner.tools.nfs.results import (
    OTHER_FILESYSTEM,
    Finding,
    explain_errno,
    failed,
    format_duration,
    format_ranks,
    passed,
    warned,
)
from simpletuner.tools.nfs.workspace import write_atomically

RENAMING_SECONDS = 0.25
LINES = 512
RELEASE_SECONDS = 5.0
LOCKS_FIX = (
    "NFS: mount without `nolock` and `local_lock` (NFS 3 also needs: sudo systemctl start rpc-statd)",
    "Lustre: mount with `flock`. Others: use NFS 4, Lustre or CephFS for output_dir",
)
REFUSED = (errno.EWOULDBLOCK, errno.EACCES)


def check_write(peers: Rendezvous) -> Finding:
    """Check `write`: create a file in the path itself, and sync it to the disk."""
    probe, began = peers.workspace.probe(peers.node.rank), time.monotonic()
    try:
        peers.workspace.create()
        with probe.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        sentence, fix = explain_errno(error, peers.node.path)
        return failed("write", sentence, fix, errno=errno.errorcode.get(error.errno or 0, ""))
    finally:
        with contextlib.suppress(OSError):  # a folder that refuses this as well has been found wrong already
            probe.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    return passed("write", f"a file was created, synced and removed in {format_duration(seconds)}", seconds=seconds)


def check_rename(peers: Rendezvous) -> Finding:
    """Check `rename`: replace a file again and again while all nodes read each other's."""
    node, seen, closed, versions = peers.node, Counter[str](), threading.Event(), [0]
    own = peers.workspace.file(node.rank, "renamed")

    def keep_replacing() -> None:
        while not closed.wait(0.001):
            versions.append(versions[-1] + 1)
            replace_with(own, versions[-1])

    replace_with(own, 0)
    peers.gather("start")
    writer = threading.Thread(target=keep_replacing, daemon=True)
    writer.start()
    ends = time.monotonic() + RENAMING_SECONDS
    while time.monotonic() < ends:
        for other in node.others or [node.rank]:
            seen[read_state(peers.workspace.file(other, "renamed"))] += 1
        peers.pause(0)
    closed.set()
    writer.join()
    peers.gather("end")
    return judge_rename(seen, versions[-1])


def replace_with(path: Path, version: int) -> None:
    """Write a version in every line, so that half a file shows."""
    write_atomically(path, f"{version:08d}\n" * LINES)


def read_state(path: Path) -> str:
    """Read a file; return `whole`, `half`, `missing`, or `stale` (ESTALE)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        if error.errno == errno.ESTALE:
            return "stale"
        raise
    return "whole" if len(lines) == LINES and len(set(lines)) == 1 else "half"


def judge_rename(seen: Counter[str], replaced: int) -> Finding:
    values = {word: seen[word] for word in ("whole", "missing", "half", "stale")}
    counts = f"{count_noun(seen.total(), 'read')} while this node's file was replaced {replaced} times"
    if seen["missing"] or seen["half"]:
        sentence = f"{counts}: {seen['missing']} found no file, {seen['half']} half of one"
        return failed("rename", sentence, OTHER_FILESYSTEM, **values)
    if seen["stale"]:
        fix = "harmless for runs, which read again; NFS 4.1 or newer is better at this: vers=4.2 in /etc/fstab"
        return warned("rename", f"{counts}: {seen['stale']} met a stale file handle (ESTALE)", fix, **values)
    return passed("rename", f"{counts}: never missing, never half", **values)


def check_lock(peers: Rendezvous) -> Finding:
    """Check `lock`: node 0 takes a lock, the others must be refused, and obtain it after its release."""
    # flock(2), since that keeps two runs out of one folder (`locks.lock_output_dir`)
    node, path = peers.node, peers.workspace.file(0, "lock")
    if node.rank == 0:
        path.touch()
        # Whatever the umask: the others open it for writing, perhaps as other users.
        path.chmod(0o666)
    peers.gather("start")
    # NFS grants exclusive locks only on files that are open for writing
    with path.open("r+b") as first, path.open("r+b") as second:
        held = peers.gather("held", try_lock(node, first.fileno(), keep=True) if node.rank == 0 else 0)[0]
        if held in REFUSED:
            return failed("lock", "node 0 could not take a lock on a new file: another process holds it", *LOCKS_FIX)
        if held:
            return judge_lock(node, path, {0: held}, {})
        contends = node.is_alone or node.rank != 0
        tried = peers.gather("tried", try_lock(node, second.fileno()) if contends else errno.EWOULDBLOCK)
        if node.rank == 0:
            node.flock(first.fileno(), fcntl.LOCK_UN)
        peers.gather("released")
        seconds = peers.gather("seconds", seconds_until_locked(peers, second.fileno()))
    return judge_lock(node, path, tried, seconds)


def try_lock(node: Node, descriptor: int, keep: bool = False) -> int:
    """Lock, and unlock again unless it is to be kept; return 0 when the lock was obtained, else the errno."""
    try:
        node.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not keep:
            node.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def seconds_until_locked(peers: Rendezvous, descriptor: int) -> float | None:
    """Return how long it took to obtain a lock that was released; None if that failed."""
    for waited in peers.polls(RELEASE_SECONDS):
        number = try_lock(peers.node, descriptor)
        if number not in REFUSED:
            return None if number else waited
    return None


def judge_lock(node: Node, path: Path, tried: Mapping[int, int], seconds: Mapping[int, float | None]) -> Finding:
    """Judge by what trying returned while node 0 held the lock, and by how soon after its release it was obtained."""
    values = {"obtained_seconds": seconds.get(node.rank)}
    if unable := {rank: number for rank, number in tried.items() if number not in (0, *REFUSED)}:
        rank, number = min(unable.items())
        sentence, fix = explain_errno(OSError(number, os.strerror(number)), path.parent.parent)
        return failed("lock", f"node {rank}: {sentence}", fix, **values)
    if ignored := [rank for rank, number in tried.items() if number == 0]:
        sentence = f"{format_ranks(ignored)} got the lock that node 0 was holding: locks are not shared"
        return failed("lock", sentence, *LOCKS_FIX, **values)
    if late := [rank for rank, waited in seconds.items() if waited is None]:
        sentence = f"{format_ranks(late)} did not get the lock within {RELEASE_SECONDS:g} s of its release"
        return failed("lock", sentence, *LOCKS_FIX, **values)
    who = "a second opener was" if node.is_alone else "the others were"
    return passed("lock", f"flock held by node 0: {who} refused, and obtained it after its release", **values)
