"""What saving and resuming rely on: atomic rename, exclusive create, locks, and deletes that other nodes see."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simpletuner.tools.nfs.filesystems import OTHER_FILESYSTEM
from simpletuner.tools.nfs.rendezvous import Node, Rendezvous
from simpletuner.tools.nfs.results import (
    Finding,
    explain_errno,
    failed,
    format_duration,
    format_ranks,
    passed,
    plural,
    skipped,
    warned,
)
from simpletuner.tools.nfs.visibility import LATE_SECONDS, SLOW_CACHE_FIX, ping_folder
from simpletuner.tools.nfs.workspace import GONE, Workspace, invalidate_dir_cache

RENAMING_SECONDS = 0.25
LINES = 512
RACES_PER_NODE = 4
RELEASE_SECONDS = 5.0
DELETE_SECONDS = 15.0
LOCKS_FIX = (
    "NFS: mount without `nolock` and `local_lock` (NFS 3 also needs: sudo systemctl start rpc-statd)",
    "Lustre: mount with `flock`. Others: use NFS 4, Lustre or CephFS for output_dir",
)
REFUSED = (errno.EWOULDBLOCK, errno.EACCES)


def check_write(node: Node, workspace: Workspace) -> Finding:
    """Check `write`: create a file in the path itself, and sync it to the disk."""
    probe, began = workspace.probe(node.rank), time.monotonic()
    try:
        workspace.create()
        with probe.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        sentence, fix = explain_errno(error, workspace.path)
        return failed("write", sentence, fix, errno=errno.errorcode.get(error.errno or 0, ""))
    finally:
        with contextlib.suppress(OSError):  # a folder that refuses this as well has been found wrong already
            probe.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    return passed("write", f"a file was created, synced and removed in {format_duration(seconds)}", seconds=seconds)


def check_rename(node: Node, peers: Rendezvous) -> Finding:
    """Check `rename`: replace a file again and again while all nodes read each other's."""
    own, readers = peers.workspace.file(node.rank, "renamed"), node.others or [node.rank]
    replace_with(own, 0)
    peers.gather("start")
    closed, seen, replaced = threading.Event(), Counter[str](), Counter[str]()
    writer = threading.Thread(target=keep_replacing, args=(own, closed, replaced), daemon=True)
    writer.start()
    ends = time.monotonic() + RENAMING_SECONDS
    while time.monotonic() < ends:
        for other in readers:
            seen[read_state(peers.workspace.file(other, "renamed"))] += 1
        peers.pause(0)
    closed.set()
    writer.join()
    peers.gather("end")
    return judge_rename(seen, replaced["replaced"])


def keep_replacing(path: Path, closed: threading.Event, replaced: Counter[str]) -> None:
    while not closed.wait(0.001):
        replaced["replaced"] += 1
        replace_with(path, replaced["replaced"])


def replace_with(path: Path, version: int) -> None:
    """Write a version under a temporary name and rename it; every line holds the version, so half a file shows."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{version:08d}\n" * LINES, encoding="utf-8")
    new.replace(path)


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
    counts = f"{plural(seen.total(), 'read')} while this node's file was replaced {replaced} times"
    if seen["missing"] or seen["half"]:
        sentence = f"{counts}: {seen['missing']} found no file, {seen['half']} half of one"
        return failed("rename", sentence, OTHER_FILESYSTEM, **values)
    if seen["stale"]:
        fix = "harmless for runs, which read again; NFS 4.1 or newer is better at this: vers=4.2 in /etc/fstab"
        return warned("rename", f"{counts}: {seen['stale']} met a stale file handle (ESTALE)", fix, **values)
    return passed("rename", f"{counts}: never missing, never half", **values)


def check_exclusive(node: Node, peers: Rendezvous) -> Finding:
    """Check `exclusive`: all nodes create the same files with O_EXCL at once, and each file must have one winner."""
    names = [f"{owner}-race-{number}" for owner in range(node.nodes) for number in range(RACES_PER_NODE)]
    peers.gather("start")
    wins = [name for name in names * 2 if creates(peers.workspace.folder / name)]
    everyone = peers.gather("wins", wins)
    winners = Counter(name for won in everyone.values() for name in won)
    wrong = {name: winners[name] for name in names if winners[name] != 1}
    peers.gather("end")
    contest = f"{plural(node.nodes, 'node')} raced to create {len(names)} files with O_EXCL"
    if wrong:
        counts = " or ".join(map(str, sorted(set(wrong.values()))))
        sentence = f"{contest}: {len(wrong)} of them had {counts} winners"
        return failed("exclusive", sentence, OTHER_FILESYSTEM, wrong=len(wrong))
    return passed("exclusive", f"{contest}: one winner each, {len(wins)} here", won=len(wins))


def creates(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    return True


def check_lock(node: Node, peers: Rendezvous) -> Finding:
    """Check `lock`: node 0 takes a lock, the others must be refused, and obtain it after its release."""
    # flock(2), since that keeps two runs out of one folder (`locks.lock_output_dir`)
    path = peers.workspace.file(0, "lock")
    if node.rank == 0:
        path.touch()
        path.chmod(0o666)
    peers.gather("start")
    part = hold_lock(node, peers, path) if node.rank == 0 else contend_for_lock(node, peers, path)
    return judge_lock(node, path, peers.gather("result", part))


def hold_lock(node: Node, peers: Rendezvous, path: Path) -> dict[str, Any]:
    """Take the lock, let the others try, release it; return how that went."""
    with open_for_lock(path) as file, open_for_lock(path) as second:
        number = try_lock(node, file)
        peers.post("held", number)
        if number:
            return {"error": number, "tried": number, "seconds": None}
        peers.wait("tried")
        tried_again = try_lock(node, second) if node.is_alone else errno.EWOULDBLOCK
        node.flock(file, fcntl.LOCK_UN)
        peers.post("released")
        return {"error": 0, "tried": tried_again, "seconds": seconds_until_locked(node, peers, second)}


def contend_for_lock(node: Node, peers: Rendezvous, path: Path) -> dict[str, Any]:
    """Try the lock while node 0 holds it and after its release; return how that went."""
    with open_for_lock(path) as file:
        if number := peers.wait("held", [0])[0]:
            return {"error": 0, "tried": number, "seconds": None}
        tried = try_lock(node, file)
        if tried == 0:
            node.flock(file, fcntl.LOCK_UN)
        peers.post("tried")
        peers.wait("released", [0])
        return {"error": 0, "tried": tried, "seconds": seconds_until_locked(node, peers, file)}


@contextmanager
def open_for_lock(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR)  # NFS grants exclusive locks only on files that are open for writing
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(node: Node, descriptor: int) -> int:
    """Return 0 when the lock was obtained, else the errno."""
    try:
        node.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def seconds_until_locked(node: Node, peers: Rendezvous, descriptor: int) -> float | None:
    """Return how long it took to obtain a lock that was released; None if that failed."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < RELEASE_SECONDS:
        number = try_lock(node, descriptor)
        if number == 0:
            node.flock(descriptor, fcntl.LOCK_UN)
            return seconds
        if number not in REFUSED:
            return None
        peers.pause(0.01)
    return None


def judge_lock(node: Node, path: Path, parts: Mapping[int, Mapping[str, Any]]) -> Finding:
    """Judge what all nodes found, the most informative problem first."""
    unable = {rank: part["error"] or part["tried"] for rank, part in parts.items()}
    unable = {rank: number for rank, number in unable.items() if number not in (0, *REFUSED)}
    values = {"obtained_seconds": parts[node.rank]["seconds"]}
    if unable:
        rank, number = min(unable.items())
        sentence, fix = explain_errno(OSError(number, os.strerror(number)), path.parent.parent)
        return failed("lock", f"node {rank}: {sentence}", fix, **values)
    if parts[0]["error"]:
        return failed("lock", "node 0 could not take a lock on a new file: another process holds it", *LOCKS_FIX)
    if ignored := [rank for rank, part in parts.items() if part["tried"] == 0]:
        sentence = f"{format_ranks(ignored)} got the lock that node 0 was holding: locks are not shared"
        return failed("lock", sentence, *LOCKS_FIX, **values)
    if late := [rank for rank, part in parts.items() if part["seconds"] is None]:
        sentence = f"{format_ranks(late)} did not get the lock within {RELEASE_SECONDS:g} s of its release"
        return failed("lock", sentence, *LOCKS_FIX, **values)
    who = "a second opener was" if node.is_alone else "the others were"
    return passed("lock", f"flock held by node 0: {who} refused, and obtained it after its release", **values)


def check_delete(node: Node, peers: Rendezvous) -> Finding:
    """Check `delete`: how soon the others see that a file is gone."""
    if node.is_alone:
        return skipped("delete", "one node: nobody else has to see that a file is gone")
    files = {rank: ping_folder(peers, rank) / "doomed" for rank in range(node.nodes)}
    files[node.rank].write_text("x", encoding="utf-8")
    peers.gather("written")
    for other in node.others:
        is_visible(files[other])  # so that it is in this client's cache
    peers.gather("read")
    began = time.monotonic()  # all nodes delete now; the clock starts before, so the next `gather` counts as well
    files[node.rank].unlink()
    peers.gather("deleted")
    still_visible = wait_until_gone({rank: files[rank] for rank in node.others}, peers)
    seconds = time.monotonic() - began
    peers.gather("end")
    if still_visible:
        sentence = f"{len(still_visible)} of {len(files) - 1} deleted files still show after {DELETE_SECONDS:g} s"
        return failed("delete", sentence, SLOW_CACHE_FIX, seconds=seconds)
    sentence = f"what other nodes deleted was gone here in {format_duration(seconds)}"
    if seconds > LATE_SECONDS:
        return warned("delete", f"{sentence}: above {LATE_SECONDS:g} s", SLOW_CACHE_FIX, seconds=seconds)
    return passed("delete", sentence, seconds=seconds)


def wait_until_gone(files: dict[int, Path], peers: Rendezvous) -> set[int]:
    """Wait until no file is visible any more; return those that still are at the timeout."""
    began, left = time.monotonic(), set(files)
    while left := {rank for rank in left if is_visible(files[rank])}:
        waited = time.monotonic() - began
        if waited > DELETE_SECONDS:
            break
        if waited > LATE_SECONDS:
            for rank in left:
                invalidate_dir_cache(files[rank].parent)
        peers.pause(0.005 if waited < 1 else 0.05)
    return left


def is_visible(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    return True
