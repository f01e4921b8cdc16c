"""Room for what the run will write, and how fast it can be written and read."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from simpletuner.system.numbers import format_gb
from simpletuner.tools.nfs.findings import Finding, failed, passed, plural, warned
from simpletuner.tools.nfs.footprint import Footprint, bytes_there
from simpletuner.tools.nfs.meeting import Meeting
from simpletuner.tools.nfs.node import Node

MIB, GB = 2**20, 10**9
MARGIN = 1.2
"""Caches, pictures and metrics come on top of checkpoints: below this many times the estimate is a warning."""
LEAST_FREE_BYTES = GB
LEAST_FREE_INODES = 10_000
DEFAULT_SIZE_MIB = 32
BUDGET_SECONDS = 0.4
"""Without --size, writing stops after this long, so that the whole check stays short on a slow disk."""
CHUNK_BYTES = 4 * MIB
SLOW_MIB_PER_SECOND = 20.0


def space(node: Node) -> Finding:
    """Return whether what the run will write fits into what is free."""
    state = os.statvfs(next(path for path in (node.path, *node.path.parents) if path.exists()))
    free, inodes = state.f_bavail * state.f_frsize, state.f_favail
    need = max(0, node.footprint.total_bytes - bytes_there(node.path)) if node.footprint else None
    values: dict[str, Any] = {"free_bytes": free, "need_bytes": need}
    values["free_inodes"] = inodes if state.f_files else None
    sentence = f"{format_gb(free)} free" + (f", {inodes:,} inodes" if state.f_files else "")
    sentence += f"; the run needs {estimate(node.footprint, need)}"
    more_room = f"df -h {node.path}   # make room, or lower --checkpoints_total_limit"
    if need is not None and free < need:
        return failed("space", sentence, more_room, **values)
    if state.f_files and inodes < LEAST_FREE_INODES:
        return warned("space", f"{sentence}: few inodes", f"df -i {node.path}   # remove many small files", **values)
    if free < max(LEAST_FREE_BYTES, MARGIN * (need or 0)):
        return warned("space", f"{sentence}: little is left for caches and pictures", more_room, **values)
    return passed("space", sentence, **values)


def estimate(footprint: Footprint | None, need: int | None) -> str:
    """Return what the run needs, and how that is reckoned."""
    if footprint is None or need is None:
        return "an unknown amount: name the model with --model_family, or a folder of weights"
    there = footprint.total_bytes - need
    return (
        f"about {format_gb(need)}: {footprint.checkpoints} x {format_gb(footprint.checkpoint_bytes)} of checkpoints, "
        f"{footprint.pipelines} x {format_gb(footprint.pipeline_bytes)} exported"
        + (f", {format_gb(there)} of it there already" if there else "")
        + f" ({footprint.parameters:,} parameters, {footprint.origin})"
    )


def speed(node: Node, meeting: Meeting) -> Finding:
    """Write a file and bring it to the disk, read a neighbour's, and return how fast both went."""
    own = meeting.place.own(node.rank, "speed")
    meeting.gather("start")
    try:
        written, write_seconds = write_file(own, node, meeting)
        neighbour = meeting.place.own((node.rank + 1) % node.nodes, "speed")
        meeting.gather("written")
        read, read_seconds = read_file(neighbour, meeting)
        meeting.gather("read")
    finally:
        own.unlink(missing_ok=True)
    return verdict_on_speed(node, written, write_seconds, read / max(read_seconds, 1e-9))


def write_file(path: Path, node: Node, meeting: Meeting) -> tuple[int, float]:
    """Write until the size, or the budget of time, is reached; return bytes and seconds with the way to the disk."""
    chunk, wanted = os.urandom(CHUNK_BYTES), bytes_to_write(node)
    written, began = 0, time.monotonic()
    with path.open("wb", buffering=0) as file:
        while written < wanted:
            written += file.write(chunk[: wanted - written])
            os.fsync(file.fileno())
            if node.size_mib is None and time.monotonic() - began > BUDGET_SECONDS:
                break
            meeting.pause(0)
        seconds = time.monotonic() - began
        forget(file.fileno())
    return written, seconds


def bytes_to_write(node: Node) -> int:
    """Return how much to write: never so much that all nodes together could fill the filesystem."""
    state = os.statvfs(node.path)
    return min((node.size_mib or DEFAULT_SIZE_MIB) * MIB, state.f_bavail * state.f_frsize // (4 * node.nodes))


def forget(descriptor: int) -> None:
    """Ask the kernel to drop what it keeps of a file in memory, so that reading it again reads the disk."""
    with contextlib.suppress(OSError):  # advice: some filesystems do not take it
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path, meeting: Meeting) -> tuple[int, float]:
    """Read a file that is not in this node's memory; return bytes and seconds."""
    read, began = 0, time.monotonic()
    with path.open("rb", buffering=0) as file:
        forget(file.fileno())
        while block := file.read(CHUNK_BYTES):
            read += len(block)
            meeting.pause(0)
    return read, time.monotonic() - began


def verdict_on_speed(node: Node, written: int, write_seconds: float, read_rate: float) -> Finding:
    """Return both speeds, and what they mean for a checkpoint."""
    rate = written / max(write_seconds, 1e-9)
    values = {"write_mib_per_second": rate / MIB, "read_mib_per_second": read_rate / MIB, "written_bytes": written}
    if written < MIB:
        fix = f"df -h {node.path}   # make room"
        return warned("speed", "not measured: writing 1 MiB for each node could fill the filesystem", fix, **values)
    together = "" if node.is_alone else f", {plural(node.nodes, 'node')} at once"
    sentence = f"wrote {rate / MIB:,.0f} MiB/s and read {read_rate / MIB:,.0f} MiB/s ({written // MIB} MiB{together})"
    if node.footprint:
        seconds = node.footprint.checkpoint_bytes / (rate * node.nodes)
        sentence += f"; one checkpoint would take {in_minutes(seconds)}"
    if rate / MIB < SLOW_MIB_PER_SECOND:
        fix = "NFS: mount with nconnect=8,rsize=1048576,wsize=1048576; look at the network and the server's disks"
        return warned("speed", f"{sentence}: below {SLOW_MIB_PER_SECOND:g} MiB/s", fix, **values)
    return passed("speed", sentence, **values)


def in_minutes(seconds: float) -> str:
    """Return a duration as people say it."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
