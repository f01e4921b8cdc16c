"""Whether the other nodes reach node 0 at the address and port where all ranks will meet."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from simpletuner.tools.nfs.findings import Finding, failed, passed, ranks_in_words, skipped, warned
from simpletuner.tools.nfs.meeting import Meeting
from simpletuner.tools.nfs.node import Node

CONNECT_SECONDS = 3.0


def port(node: Node, meeting: Meeting) -> Finding:
    """Return whether all nodes reach node 0."""
    if node.is_alone:
        return skipped("port", "one node: nobody else has to connect")
    addresses = meeting.gather("address", f"{node.address}:{node.port}")
    if len(set(addresses.values())) > 1:
        listed = ", ".join(f"node {rank}: {address}" for rank, address in sorted(addresses.items()))
        fix = "give all nodes the same --main_process_ip and --main_process_port"
        return failed("port", f"the nodes were told different addresses of node 0 ({listed})", fix)
    if not node.address:
        return warned("port", "not checked: main_process_ip is not set", "add --main_process_ip=ADDRESS of node 0")
    return answer_calls(node, meeting) if node.rank == 0 else call(node, meeting)


def answer_calls(node: Node, meeting: Meeting) -> Finding:
    """Listen as the run will, and return what the others tell of their calls."""
    try:
        server = listening_socket(node.port)
    except OSError as error:
        meeting.gather("listening", error.errno or errno.EIO)
        return cannot_listen(node, error.errno or errno.EIO)
    with server, answering(server, meeting.token):
        meeting.gather("listening", 0)
        return verdict_on_port(node, meeting.gather("outcome", ""))


def call(node: Node, meeting: Meeting) -> Finding:
    """Connect to node 0, and return what all others tell of their calls."""
    number = meeting.gather("listening")[0]
    if number:
        return cannot_listen(node, number)
    return verdict_on_port(node, meeting.gather("outcome", why_not_reached(node, meeting.token_of(0))))


def listening_socket(number: int) -> socket.socket:
    """Return a socket that listens on all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", number), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", number))


@contextmanager
def answering(server: socket.socket, token: str) -> Iterator[None]:
    """Tell everyone who connects the token that says which process this is."""
    ending = threading.Event()
    server.settimeout(0.05)

    def answer() -> None:
        """Answer one call after the other."""
        while not ending.is_set():
            with contextlib.suppress(OSError):  # nobody called, or the caller hung up
                caller, _ = server.accept()
                with caller:
                    caller.settimeout(CONNECT_SECONDS)
                    caller.sendall(token.encode())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def why_not_reached(node: Node, token: str) -> str:
    """Connect to node 0 and return why that failed, or nothing."""
    try:
        with socket.create_connection((node.address, node.port), timeout=CONNECT_SECONDS) as connection:
            said = b""
            while len(said) < len(token) and (part := connection.recv(64)):
                said += part
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s, as when a firewall drops it"
    except OSError as error:
        return error.strerror or str(error)
    return "" if said == token.encode() else "somebody else than node 0 answers there"


def verdict_on_port(node: Node, outcomes: Mapping[int, str]) -> Finding:
    """Return who reaches node 0 and who does not."""
    where = f"{node.address} port {node.port}"
    refused = {rank: said for rank, said in outcomes.items() if said}
    if not refused:
        return passed("port", f"{ranks_in_words(range(1, node.nodes))} reached node 0 at {where}")
    listed = "; ".join(f"node {rank}: {said}" for rank, said in sorted(refused.items()))
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
    """Return why node 0 could not take its port."""
    other = f"or choose another port: --main_process_port={node.port + 1}"
    if number == errno.EADDRINUSE:
        look = f"on node 0: sudo ss -ltnp 'sport = :{node.port}'   # who has it"
        return failed("port", f"port {node.port} of node 0 is already in use", look, other)
    reason = "ports below 1024 are for root" if number == errno.EACCES else errno.errorcode.get(number, "an error")
    return failed("port", f"node 0 cannot listen on port {node.port}: {reason}", other)
