"""Checks `space` and `port`: is the disk large enough that the run will use, and is its address reachable?"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from simpletuner.system.files.cache_files import bytes_of
from simpletuner.system.network import listen_on_all_addresses
from simpletuner.tools.nfs.mounts import OBJECT_STORES, mount_of_node, name_of
from simpletuner.tools.nfs.rendezvous import Node, Rendezvous
from simpletuner.tools.nfs.results import Finding, failed, format_ranks, passed, skipped, warned

# Caches, images and metrics come on top of checkpoints: below this many times the estimate is a warning.
MARGIN = 1.2
LEAST_FREE_BYTES = 10**9
LEAST_FREE_INODES = 10_000
CONNECT_SECONDS = 3.0


def bytes_present(output: Path) -> int:
    """Return the bytes of checkpoints and pipelines that earlier starts of the run have written."""
    return sum(map(bytes_of, [output / "checkpoints", *output.glob("pipeline*")]))


def check_space(node: Node) -> Finding:
    """Check `space`: does what the run will write fit into what is free?"""
    need = max(0, node.disk_usage.total_bytes - bytes_present(node.path)) if node.disk_usage else None
    mount = mount_of_node(node)
    if mount is not None and mount.fstype in OBJECT_STORES:
        # s3fs answers 18.4 EB, rclone 1.1 PB and none of 1,000,000,000 inodes: constants of theirs.
        why = f"not checked: {name_of(mount)} does not say what room its store has"
        return skipped("space", f"{why}; the run needs {describe_need(node, need)}", need_bytes=need)
    state = os.statvfs(next(path for path in (node.path, *node.path.parents) if path.exists()))
    free, inodes = state.f_bavail * state.f_frsize, state.f_favail
    values: dict[str, Any] = {"free_bytes": free, "need_bytes": need}
    values["free_inodes"] = inodes if state.f_files else None  # btrfs, for one, has no such limit
    sentence = f"{decimal(free)} free" + (f", {inodes:,} inodes" if state.f_files else "")
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
    usage = node.disk_usage
    if usage is None or need is None:
        return f"an unknown amount: {node.disk_unknown}"
    present = f", {decimal(usage.total_bytes - need)} of it there already" if need < usage.total_bytes else ""
    return f"about {decimal(need)}: {usage.parts}{present} ({usage.parameters:,} parameters, {usage.origin})"


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
    """Listen as the run will, and send a nonce to who connects, as proof that node 0 answers.

    Yields 0, or the errno if that is not possible.
    """
    try:
        server = listen_on_all_addresses(node.port)
    except OSError as error:
        yield error.errno or errno.EIO
        return
    closed = threading.Event()

    def send_nonce() -> None:
        # So that `closed` is noticed: nothing else ends a thread that waits in accept().
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
