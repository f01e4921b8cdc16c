"""What saving and resuming rely on: rename in one step, one winner of an exclusive create, deletes that are seen."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from pathlib import Path

from simpletuner.tools.nfs.faults import explained
from simpletuner.tools.nfs.filesystems import OTHER_FILESYSTEM
from simpletuner.tools.nfs.findings import Finding, duration, failed, passed, plural, skipped, warned
from simpletuner.tools.nfs.meeting import Meeting
from simpletuner.tools.nfs.node import Node
from simpletuner.tools.nfs.place import GONE, Place, look_anew
from simpletuner.tools.nfs.seeing import LATE_SECONDS, SLOW_CACHE_FIX, own_folder

RENAMING_SECONDS = 0.25
LINES = 512
RACES_PER_NODE = 4
DELETE_SECONDS = 15.0


def write(node: Node, place: Place) -> Finding:
    """Return whether this node can create a file in the path itself, and bring it to the disk."""
    probe, began = place.probe(node.rank), time.monotonic()
    try:
        place.make()
        with probe.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        sentence, fix = explained(error, place.path)
        return failed("write", sentence, fix, errno=errno.errorcode.get(error.errno or 0, ""))
    finally:
        with contextlib.suppress(OSError):  # a folder that refuses this, too, has been found wrong already
            probe.unlink(missing_ok=True)
    seconds = time.monotonic() - began
    return passed("write", f"a file was created, synced and removed in {duration(seconds)}", seconds=seconds)


def rename(node: Node, meeting: Meeting) -> Finding:
    """Replace a file again and again while all nodes read each other's, and return what they saw."""
    own, readers = meeting.place.own(node.rank, "renamed"), node.others or [node.rank]
    replace_with(own, 0)
    meeting.gather("start")
    ending, seen, replaced = threading.Event(), Counter[str](), Counter[str]()
    writer = threading.Thread(target=keep_replacing, args=(own, ending, replaced), daemon=True)
    writer.start()
    ends = time.monotonic() + RENAMING_SECONDS
    while time.monotonic() < ends:
        for other in readers:
            seen[look(meeting.place.own(other, "renamed"))] += 1
        meeting.pause(0)
    ending.set()
    writer.join()
    meeting.gather("end")
    return verdict_on_rename(seen, replaced["replaced"])


def keep_replacing(path: Path, ending: threading.Event, replaced: Counter[str]) -> None:
    """Replace a file by its next version until the end."""
    while not ending.wait(0.001):
        replaced["replaced"] += 1
        replace_with(path, replaced["replaced"])


def replace_with(path: Path, version: int) -> None:
    """Write a version beside, and give it the name; every line says which version it is."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{version:08d}\n" * LINES, encoding="utf-8")
    new.replace(path)


def look(path: Path) -> str:
    """Return in one word what a reader finds."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        if error.errno == errno.ESTALE:
            return "stale"
        raise
    return "whole" if len(lines) == LINES and len(set(lines)) == 1 else "half"


def verdict_on_rename(seen: Counter[str], replaced: int) -> Finding:
    """Return what readers saw of files that were replaced."""
    values = {word: seen[word] for word in ("whole", "missing", "half", "stale")}
    counts = f"{plural(seen.total(), 'read')} while this node's file was replaced {replaced} times"
    if seen["missing"] or seen["half"]:
        sentence = f"{counts}: {seen['missing']} found no file, {seen['half']} half of one"
        return failed("rename", sentence, OTHER_FILESYSTEM, **values)
    if seen["stale"]:
        fix = "harmless for runs, which read again; NFS 4.1 or newer is better at this: vers=4.2 in /etc/fstab"
        return warned("rename", f"{counts}: {seen['stale']} met a stale file handle (ESTALE)", fix, **values)
    return passed("rename", f"{counts}: never missing, never half", **values)


def exclusive(node: Node, meeting: Meeting) -> Finding:
    """Let all nodes create the same files with O_EXCL at once, and return whether each had one winner."""
    names = [f"{owner}-race-{number}" for owner in range(node.nodes) for number in range(RACES_PER_NODE)]
    meeting.gather("start")
    wins = [name for name in names * 2 if creates(meeting.place.folder / name)]
    everyone = meeting.gather("wins", wins)
    winners = Counter(name for won in everyone.values() for name in won)
    wrong = {name: winners[name] for name in names if winners[name] != 1}
    meeting.gather("end")
    contest = f"{plural(node.nodes, 'node')} raced to create {len(names)} files with O_EXCL"
    if wrong:
        counts = " or ".join(map(str, sorted(set(wrong.values()))))
        sentence = f"{contest}: {len(wrong)} of them had {counts} winners"
        return failed("exclusive", sentence, OTHER_FILESYSTEM, wrong=len(wrong))
    return passed("exclusive", f"{contest}: one winner each, {len(wins)} here", won=len(wins))


def creates(path: Path) -> bool:
    """Return whether this process created a file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    return True


def delete(node: Node, meeting: Meeting) -> Finding:
    """Return how soon the others see that a file is gone; all read it first, so that caches have it."""
    if node.is_alone:
        return skipped("delete", "one node: nobody else has to see that a file is gone")
    files = {rank: own_folder(meeting, rank) / "doomed" for rank in range(node.nodes)}
    files[node.rank].write_text("x", encoding="utf-8")
    meeting.gather("written")
    for other in node.others:
        is_there(files[other])
    meeting.gather("read")
    began = time.monotonic()  # all delete now: what is seen at once may have taken as long as the nodes' next word
    files[node.rank].unlink()
    meeting.gather("deleted")
    still_there = wait_until_gone({rank: files[rank] for rank in node.others}, meeting)
    seconds = time.monotonic() - began
    meeting.gather("end")
    if still_there:
        sentence = f"{len(still_there)} of {len(files) - 1} deleted files still show after {DELETE_SECONDS:g} s"
        return failed("delete", sentence, SLOW_CACHE_FIX, seconds=seconds)
    sentence = f"what other nodes deleted was gone here in {duration(seconds)}"
    if seconds > LATE_SECONDS:
        return warned("delete", f"{sentence}: above {LATE_SECONDS:g} s", SLOW_CACHE_FIX, seconds=seconds)
    return passed("delete", sentence, seconds=seconds)


def wait_until_gone(files: dict[int, Path], meeting: Meeting) -> set[int]:
    """Wait until no file is seen any more; return those that are still seen at the end."""
    began, left = time.monotonic(), set(files)
    while left := {rank for rank in left if is_there(files[rank])}:
        waited = time.monotonic() - began
        if waited > DELETE_SECONDS:
            break
        if waited > LATE_SECONDS:
            for rank in left:
                look_anew(files[rank].parent)
        meeting.pause(0.005 if waited < 1 else 0.05)
    return left


def is_there(path: Path) -> bool:
    """Return whether a file can be read."""
    try:
        path.read_bytes()
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    return True
