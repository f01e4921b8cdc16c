"""Check `port`: do the other nodes reach node 0 at the address and port that the run will use?"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from simpletuner.system.network import listen_on_all_addresses
from simpletuner.tools.nfs.rendezvous import Node, Rendezvous
from simpletuner.tools.nfs.results import Finding, failed, format_ranks, passed, skipped, warned

CONNECT_SECONDS = 3.0


def check_port(node: Node, peers: Rendezvous) -> Finding:
    if node.is_alone:
        return skipped("port", "one node: nobody else has to connect")
    addresses = peers.gather("address", f"{node.address}:{node.port}")
    if len(set(addresses.values())) > 1:
        listed = ", ".join(f"node {rank}: {address}" for rank, address in sorted(addresses.items()))
        fix = "give all nodes the same --main_process_ip and --main_process_port"
        return failed("port", f"the nodes were told different addresses of node 0 ({listed})", fix)
    if not node.address:
        return warned("port", "not checked: main_process_ip is not set", "add --main_process_ip=ADDRESS of node 0")
    return listen(node, peers) if node.rank == 0 else connect(node, peers)


def listen(node: Node, peers: Rendezvous) -> Finding:
    """Listen as the run will, on node 0, and judge what the others report."""
    try:
        server = listen_on_all_addresses(node.port)
    except OSError as error:
        peers.gather("listening", error.errno or errno.EIO)
        return cannot_listen(node, error.errno or errno.EIO)
    with server, send_nonce(server, peers.info.nonce):
        peers.gather("listening", 0)
        return judge_port(node, peers.gather("outcome", ""))


def connect(node: Node, peers: Rendezvous) -> Finding:
    """Connect to node 0, and judge what all others report."""
    number = peers.gather("listening")[0]
    if number:
        return cannot_listen(node, number)
    return judge_port(node, peers.gather("outcome", why_unreachable(node, peers.nonce_of(0))))


@contextmanager
def send_nonce(server: socket.socket, nonce: str) -> Iterator[None]:
    """Send this process's nonce to everyone who connects, as proof that it is node 0 who answers."""
    closed = threading.Event()
    server.settimeout(0.05)

    def serve() -> None:
        while not closed.is_set():
            with contextlib.suppress(OSError):  # nobody connected, or the other end hung up
                client, _ = server.accept()
                with client:
                    client.settimeout(CONNECT_SECONDS)
                    client.sendall(nonce.encode())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def why_unreachable(node: Node, nonce: str) -> str:
    """Connect to node 0 and return why that failed; empty if it did not."""
    try:
        with socket.create_connection((node.address, node.port), timeout=CONNECT_SECONDS) as connection:
            received = b""
            while len(received) < len(nonce) and (part := connection.recv(64)):
                received += part
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
