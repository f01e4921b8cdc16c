"""Checks `space`, `speed` and `port`: are the disk and the address that the run will use large, fast and reachable?"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simpletuner.system.network import listen_on_all_addresses
from simpletuner.system.numbers import format_gb
from simpletuner.tools.nfs.rendezvous import Node, Rendezvous
from simpletuner.tools.nfs.results import Finding, failed, format_ranks, passed, plural, skipped, warned

MIB, GB = 2**20, 10**9
# Caches, images and metrics come on top of checkpoints: below this many times the estimate is a warning.
MARGIN = 1.2
LEAST_FREE_BYTES = GB
LEAST_FREE_INODES = 10_000
DEFAULT_SIZE_MIB = 32
# Without --size, writing stops after this long, so that the whole check stays short on a slow disk.
BUDGET_SECONDS = 0.4
CHUNK_BYTES = 4 * MIB
SLOW_MIB_PER_SECOND = 20.0
CONNECT_SECONDS = 3.0


def bytes_present(output: Path) -> int:
    """Return the bytes of checkpoints and pipelines that earlier starts of the run have written."""
    folders = [output / "checkpoints", *output.glob("pipeline*")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def check_space(node: Node) -> Finding:
    """Check `space`: does what the run will write fit into what is free?"""
    state = os.statvfs(next(path for path in (node.path, *node.path.parents) if path.exists()))
    free, inodes = state.f_bavail * state.f_frsize, state.f_favail
    need = max(0, node.disk_usage.total_bytes - bytes_present(node.path)) if node.disk_usage else None
    values: dict[str, Any] = {"free_bytes": free, "need_bytes": need}
    values["free_inodes"] = inodes if state.f_files else None  # some filesystems, such as btrfs, have no such limit
    sentence = f"{format_gb(free)} free" + (f", {inodes:,} inodes" if state.f_files else "")
    sentence += f"; the run needs {describe_need(node, need)}"
    more_room = f"df -h {node.path}   # make room, or lower --checkpoints_total_limit"
    if need is not None and free < need:
        return failed("space", sentence, more_room, **values)
    if state.f_files and inodes < LEAST_FREE_INODES:
        return warned("space", f"{sentence}: few inodes", f"df -i {node.path}   # remove many small files", **values)
    if free < max(LEAST_FREE_BYTES, MARGIN * (need or 0)):
        return warned("space", f"{sentence}: little is left for caches and images", more_room, **values)
    return passed("space", sentence, **values)


def describe_need(node: Node, need: int | None) -> str:
    """Describe what the run needs, and how that is computed."""
    usage = node.disk_usage
    if usage is None or need is None:
        return f"an unknown amount: {node.disk_unknown}"
    present = f", {format_gb(usage.total_bytes - need)} of it there already" if need < usage.total_bytes else ""
    return f"about {format_gb(need)}: {usage.parts}{present} ({usage.parameters:,} parameters, {usage.origin})"


def check_speed(peers: Rendezvous) -> Finding:
    """Check `speed`: write and sync a file, read another node's; all nodes at once."""
    node = peers.node
    own = peers.workspace.file(node.rank, "speed")
    peers.gather("start")
    try:
        written, write_seconds = write_file(own, peers)
        neighbour = peers.workspace.file((node.rank + 1) % node.nodes, "speed")
        peers.gather("written")
        read, read_seconds = read_file(neighbour, peers)
        peers.gather("read")
    finally:
        own.unlink(missing_ok=True)
    return judge_speed(node, written, write_seconds, read / max(read_seconds, 1e-9))


def write_file(path: Path, peers: Rendezvous) -> tuple[int, float]:
    """Write until the size or the time budget is reached; return bytes, and seconds with the syncs."""
    node, chunk = peers.node, os.urandom(CHUNK_BYTES)  # random: some filesystems compress
    room = shutil.disk_usage(node.path).free // (4 * node.nodes)  # all nodes together: a quarter of what is free
    wanted, written, began = min((node.size_mib or DEFAULT_SIZE_MIB) * MIB, room), 0, time.monotonic()
    with path.open("wb", buffering=0) as file:
        while written < wanted:
            written += file.write(chunk[: wanted - written])
            os.fsync(file.fileno())
            if node.size_mib is None and time.monotonic() - began > BUDGET_SECONDS:
                break
            peers.pause(0)
        seconds = time.monotonic() - began
        drop_from_page_cache(file.fileno())
    return written, seconds


def drop_from_page_cache(descriptor: int) -> None:
    """Make the next read of a file read the disk, not memory."""
    with contextlib.suppress(OSError):  # only advice: some filesystems refuse it
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path, peers: Rendezvous) -> tuple[int, float]:
    read, began = 0, time.monotonic()
    with path.open("rb", buffering=0) as file:
        drop_from_page_cache(file.fileno())
        while block := file.read(CHUNK_BYTES):
            read += len(block)
            peers.pause(0)
    return read, time.monotonic() - began


def judge_speed(node: Node, written: int, write_seconds: float, read_rate: float) -> Finding:
    rate = written / max(write_seconds, 1e-9)
    values = {"write_mib_per_second": rate / MIB, "read_mib_per_second": read_rate / MIB, "written_bytes": written}
    if written < MIB:
        fix = f"df -h {node.path}   # make room"
        return warned("speed", "not measured: writing 1 MiB for each node could fill the filesystem", fix, **values)
    together = "" if node.is_alone else f", {plural(node.nodes, 'node')} at once"
    sentence = f"wrote {rate / MIB:,.0f} MiB/s and read {read_rate / MIB:,.0f} MiB/s ({written // MIB} MiB{together})"
    if node.disk_usage:
        seconds = node.disk_usage.checkpoint_bytes / (rate * node.nodes)
        checkpoint = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        sentence += f"; one checkpoint would take {checkpoint}"
    if rate / MIB < SLOW_MIB_PER_SECOND:
        fix = "NFS: mount with nconnect=8,rsize=1048576,wsize=1048576; look at the network and the server's disks"
        return warned("speed", f"{sentence}: below {SLOW_MIB_PER_SECOND:g} MiB/s", fix, **values)
    return passed("speed", sentence, **values)


def check_port(peers: Rendezvous) -> Finding:
    """Check `port`: the other nodes connect to node 0 at the address and port that the run will use."""
    node = peers.node
    if node.is_alone:
        return skipped("port", "one node: nobody else has to connect")
    addresses = peers.gather("address", f"{node.address}:{node.port}")
    if len(set(addresses.values())) > 1:
        listed = ", ".join(f"node {rank}: {address}" for rank, address in sorted(addresses.items()))
        fix = "give all nodes the same --main_process_ip and --main_process_port"
        return failed("port", f"the nodes were told different addresses of node 0 ({listed})", fix)
    if not node.address:
        return warned("port", "not checked: main_process_ip is not set", "add --main_process_ip=ADDRESS of node 0")
    with listening(node, peers.info.nonce) if node.rank == 0 else contextlib.nullcontext(0) as number:
        if number := peers.gather("listening", number)[0]:
            return cannot_listen(node, number)
        why = "" if node.rank == 0 else why_unreachable(node, peers.infos[0].nonce)
        return judge_port(node, peers.gather("outcome", why))


@contextmanager
def listening(node: Node, nonce: str) -> Iterator[int]:
    """Listen as the run will, and send a nonce to everyone who connects, as proof that it is node 0 who answers.

    Yields 0, or the errno if that is not possible.
    """
    try:
        server = listen_on_all_addresses(node.port)
    except OSError as error:
        yield error.errno or errno.EIO
        return
    closed = threading.Event()

    def send_nonce() -> None:
        server.settimeout(0.05)
        while not closed.is_set():
            with contextlib.suppress(OSError):  # nobody connected, or the other end hung up
                client, _ = server.accept()
                with client:
                    client.settimeout(CONNECT_SECONDS)
                    client.sendall(nonce.encode())

    thread = threading.Thread(target=send_nonce, daemon=True)
    with server:
        thread.start()
        try:
            yield 0
        finally:
            closed.set()
            thread.join()


def why_unreachable(node: Node, nonce: str) -> str:
    """Connect to node 0 and return why that failed; empty if it did not."""
    try:
        with socket.create_connection((node.address, node.port), timeout=CONNECT_SECONDS) as connection:
            received = connection.makefile("rb").read(len(nonce))
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s, as when a firewall drops it"
    except OSError as error:
        return error.strerror or str(error)
    return "" if received == nonce.encode() else "somebody else than node 0 answers there"


def judge_port(node: Node, outcomes: Mapping[int, str]) -> Finding:
    where = f"{node.address} port {node.port}"
    refused = {rank: why for rank, why in outcomes.items() if why}
    if not refused:
        return passed("port", f"{format_ranks(range(1, node.nodes))} reached node 0 at {where}")
    listed = "; ".join(f"node {rank}: {why}" for rank, why in sorted(refused.items()))
    return failed(
        "port",
        f"node 0 is not reached at {where} ({listed})",
        f"on node 0, with ufw: sudo ufw allow {node.port}/tcp",
        f"on node 0, with firewalld: sudo firewall-cmd --permanent --add-port={node.port}/tcp; "
        "sudo firewall-cmd --reload",
        f"and see that {node.address} is an address of node 0: ip addr",
        refused=refused,
    )


def cannot_listen(node: Node, number: int) -> Finding:
    other = f"or choose another port: --main_process_port={node.port + 1}"
    if number == errno.EADDRINUSE:
        look = f"on node 0: sudo ss -ltnp 'sport = :{node.port}'   # who has it"
        return failed("port", f"port {node.port} of node 0 is already in use", look, other)
    reason = "ports below 1024 are for root" if number == errno.EACCES else errno.errorcode.get(number, "an error")
    return failed("port", f"node 0 cannot listen on port {node.port}: {reason}", other)
