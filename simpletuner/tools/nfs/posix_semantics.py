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

from simpletuner.system.files.late_files import SHORTER_CACHES
from simpletuner.system.numbers import count_noun
from simpletuner.tools.nfs.mounts import NFS, fstype_of, locks_fix
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
from simpletuner.tools.nfs.workspace import GONE, arriving, write_atomically

# How long nodes rename at once while each reads the files of all.
RENAMING_SECONDS, RENAMING_LIMIT_SECONDS = 0.25, 20.0
# Fewest replacements that are judged: s3fs made one in 0.25 s, during which nothing went wrong.
REPLACEMENTS = 30
# One node ends after REPLACEMENTS and these reads: 118 of 120 checks saw a rename by unlink and rename.
READS = 100
LINES = 512
FILES = 4
"""Files of the folder that is renamed."""
RELEASE_SECONDS = 5.0
READ_AGAIN = "nothing to do: runs read such a file again, for up to 2 s"
STALE_FIXES: dict[str, str] = {
    **dict.fromkeys(NFS, f"{READ_AGAIN}; NFS 4.1 or newer is better at this: vers=4.2 in /etc/fstab"),
    "fuse.glusterfs": f"{READ_AGAIN}; GlusterFS keeps a file for 1 s: {SHORTER_CACHES['fuse.glusterfs']} against that",
}
PARTS_FIX = (
    "a checkpoint appears file by file there, and is taken for one when all of its files have their sizes: "
    f"{OTHER_FILESYSTEM} where nodes may be killed"
)
REFUSED = (errno.EWOULDBLOCK, errno.EACCES)


def check_write(peers: Rendezvous) -> Finding:
    """Check `write`: create a file in the path itself, and sync it to the disk."""
    probe, began = peers.workspace.probe(peers.node.rank), time.monotonic()

    def write() -> None:
        peers.workspace.create()
        with probe.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())

    try:
        arriving(write)
    except OSError as error:
        sentence, fix = explain_errno(error, peers.node.path)
        return failed("write", sentence, fix, errno=errno.errorcode.get(error.errno or 0, ""))
    finally:
        with contextlib.suppress(OSError):  # a folder that refuses this as well has been found wrong already
            probe.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    return passed("write", f"a file was created, synced and removed in {format_duration(seconds)}", seconds=seconds)


def check_rename(peers: Rendezvous) -> Finding:
    """Check `rename`: replace a file and rename a folder repeatedly while all nodes read all of them."""
    renamer, seen, folders = Renamer(peers), Counter[str](), Counter[str]()
    ranks = (*peers.node.others, peers.node.rank)
    read = [(peers.workspace.file(rank, "renamed"), folder_names(peers, rank)) for rank in ranks]
    peers.gather("start")
    renamer.thread.start()
    try:
        while renamer.thread.is_alive():
            for file, names in read:
                seen[read_state(file)] += 1
                folders.update(filter(None, map(read_folder, names)))
            peers.pause(0)
            if peers.node.is_alone and renamer.replaced >= REPLACEMENTS and seen.total() >= READS:
                break
    finally:
        renamer.closed.set()
        renamer.thread.join()
    peers.gather("end")
    if renamer.error is not None:
        raise renamer.error
    return judge_rename(seen, folders, renamer.replaced, fstype_of(peers.node))


class Renamer:
    """A thread that replaces a file and renames a folder, for RENAMING_SECONDS and REPLACEMENTS at least."""

    def __init__(self, peers: Rendezvous) -> None:
        self.file = peers.workspace.file(peers.node.rank, "renamed")
        self.folders = folder_names(peers, peers.node.rank)
        self.limit = min(RENAMING_LIMIT_SECONDS, peers.node.timeout_seconds / 2)
        self.replaced, self.closed = 0, threading.Event()
        self.error: OSError | None = None
        replace_with(self.file, 0)
        self.folders[0].mkdir(exist_ok=True)
        for number in range(FILES):
            write_atomically(self.folders[0] / f"{number}", "")
        self.thread = threading.Thread(target=self._run, name="renaming", daemon=True)

    def _run(self) -> None:
        began, (here, there) = time.monotonic(), self.folders
        try:
            # Without a pause: reads find more of what is wrong the more of the time a rename is under way.
            while not self.closed.is_set():
                passed_seconds = time.monotonic() - began
                if passed_seconds > (RENAMING_SECONDS if self.replaced >= REPLACEMENTS else self.limit):
                    return
                replace_with(self.file, self.replaced + 1)
                here.rename(there)
                here, there = there, here
                self.replaced += 1
        except OSError as error:
            self.error = error


def folder_names(peers: Rendezvous, rank: int) -> tuple[Path, Path]:
    return peers.workspace.file(rank, "folder-a"), peers.workspace.file(rank, "folder-b")


def read_folder(path: Path) -> str:
    """List a folder that is being renamed: `whole` or `part`, or nothing where it has its other name."""
    try:
        return "whole" if len(list(path.iterdir())) == FILES else "part"
    except OSError as error:
        if error.errno in GONE:
            return ""
        raise


def replace_with(path: Path, version: int) -> None:
    # In every line, so that half a file shows.
    write_atomically(path, f"{version:08d}\n" * LINES)


def read_state(path: Path) -> str:
    """Read a file; return `whole`, `half`, `missing`, or `stale` (ESTALE)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        if error.errno == errno.ESTALE:
            return "stale"
        raise
    line = data[: len(data) // LINES]
    return "whole" if line and line * LINES == data else "half"


def judge_rename(seen: Counter[str], folders: Counter[str], replaced: int, fstype: str) -> Finding:
    """Judge by what reads of files and of folders found, and how often each was replaced meanwhile."""
    values: dict[str, int] = {word: seen[word] for word in ("whole", "missing", "half", "stale")}
    values |= {"replaced": replaced, "folder_parts": folders["part"]}
    counts = f"{count_noun(seen.total(), 'read')} while this node's file was replaced {replaced} times"
    is_fuse = fstype.startswith("fuse")
    if seen["half"] or (seen["missing"] and not is_fuse):
        sentence = f"{counts}: {seen['missing']} found no file, {seen['half']} half of one"
        return failed("rename", sentence, OTHER_FILESYSTEM, **values)
    remarks = {
        f"{seen['missing']} found no file, as FUSE answers while one is being replaced": READ_AGAIN,
        f"{seen['stale']} met a stale file handle (ESTALE)": STALE_FIXES.get(fstype, READ_AGAIN),
        f"{folders['part']} of {folders.total()} listings found a part of a folder that was renamed": PARTS_FIX,
        f"fewer than {REPLACEMENTS} replacements in the time, too few to judge": "give the check more --timeout",
    }
    counted = (seen["missing"], seen["stale"], folders["part"], max(0, REPLACEMENTS - replaced))
    found = {remark: fix for (remark, fix), count in zip(remarks.items(), counted, strict=True) if count}
    if found:
        return warned("rename", f"{counts}: {'; '.join(found)}", *found.values(), **values)
    return passed("rename", f"{counts}: never missing, never half", **values)


def check_lock(peers: Rendezvous) -> Finding:
    """Check `lock`: node 0 takes a lock, the others must be refused, and obtain it after its release."""
    # flock(2), since that keeps two runs out of one folder where it works (`lease.py`)
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
            return failed(
                "lock",
                "node 0 could not take a lock on a new file: another process holds it",
                *locks_fix(fstype_of(node)),
            )
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
    """Return the seconds until a released lock was obtained; None if that failed."""
    for waited in peers.polls(RELEASE_SECONDS):
        number = try_lock(peers.node, descriptor)
        if number not in REFUSED:
            return None if number else waited
    return None


def judge_lock(node: Node, path: Path, tried: Mapping[int, int], seconds: Mapping[int, float | None]) -> Finding:
    """Judge by attempts while node 0 held the lock, and by the delay between release and success."""
    values, fstype = {"obtained_seconds": seconds.get(node.rank)}, fstype_of(node)
    if unable := {rank: number for rank, number in tried.items() if number not in (0, *REFUSED)}:
        rank, number = min(unable.items())
        sentence, fix = explain_errno(OSError(number, os.strerror(number)), path.parent.parent)
        return failed("lock", f"node {rank}: {sentence}", fix, **values)
    if ignored := [rank for rank, number in tried.items() if number == 0]:
        sentence = f"{format_ranks(ignored)} got the lock that node 0 was holding: locks are not shared"
        return failed("lock", sentence, *locks_fix(fstype), **values)
    if late := [rank for rank, waited in seconds.items() if waited is None]:
        sentence = f"{format_ranks(late)} did not get the lock within {RELEASE_SECONDS:g} s of its release"
        return failed("lock", sentence, *locks_fix(fstype), **values)
    who = "a second opener was" if node.is_alone else "the others were"
    return passed("lock", f"flock held by node 0: {who} refused, and obtained it after its release", **values)
