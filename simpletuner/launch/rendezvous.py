"""Where launchers meet: a key-value store that machine 0 serves, which later serves the ranks, too."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Queue
from typing import TYPE_CHECKING

from simpletuner.errors import EnvironmentNotReady
from simpletuner.launch.plan import LOOPBACK
from simpletuner.launch.registration import POLL_SECONDS, QUIET_SECONDS
from simpletuner.settings.sections import Launch

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_SECONDS = 30
"""How long an answer from the store may take once its machine has been reached."""
OWN_SECONDS = 5
"""How long machine 0 tries to reach itself at the address that the others are given."""
RETRY_SECONDS = 0.5


def serve(launch: Launch) -> TCPStore:
    """Return a store served by this process: on main_process_port, or on a free port that only this machine reaches."""
    quieten_torch()
    from torch.distributed import TCPStore

    several = launch.num_machines > 1
    wanted = launch.main_process_port if several else 0
    try:
        listener = everywhere(wanted) if several else socket.create_server((LOOPBACK, 0))
    except OSError as error:
        raise EnvironmentNotReady(
            f"port {wanted} on machine 0 cannot be used: {os.strerror(error.errno or 0).lower()}",
            f"another run may be using it; choose another port on all machines: --main_process_port={wanted + 1}",
        ) from None
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=STORE_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def everywhere(port: int) -> socket.socket:
    """Return a socket that listens on all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if "in use" in str(error):
                raise
    return socket.create_server(("", port))


def connect(launch: Launch, check: Callable[[], None], say: Callable[[str], None]) -> TCPStore:
    """Return a connection to the store of machine 0, waiting for it to start."""
    quieten_torch()
    wait_for_machine_0(launch, check, say)
    host, port = launch.main_process_ip, launch.main_process_port
    arrived: Queue[TCPStore | None] = Queue()
    threading.Thread(target=open_store, args=(host, port, arrived), daemon=True).start()
    end = time.monotonic() + STORE_SECONDS
    while arrived.empty() and time.monotonic() < end:
        check()
        time.sleep(POLL_SECONDS)
    store = None if arrived.empty() else arrived.get()
    if store is None:
        raise EnvironmentNotReady(
            f"something else than machine 0 of a run answers at {host}:{port}",
            f"choose another port on all machines, such as --main_process_port={port + 1}",
        )
    return store


def open_store(host: str, port: int, arrived: Queue[TCPStore | None]) -> None:
    """Put a connected store into the queue, or None; in a thread, since a stranger may keep it waiting for ever."""
    from torch.distributed import DistError, TCPStore

    try:
        arrived.put(TCPStore(host, port, timeout=timedelta(seconds=STORE_SECONDS), wait_for_workers=False))
    except DistError:
        arrived.put(None)


def wait_for_machine_0(launch: Launch, check: Callable[[], None], say: Callable[[str], None]) -> None:
    """Wait until somebody listens at the address of machine 0. Raises EnvironmentFault when nobody does in time."""
    host, port = launch.main_process_ip, launch.main_process_port
    patience = launch.node_join_timeout if launch.machine_rank else min(OWN_SECONDS, launch.node_join_timeout)
    began, said = time.monotonic(), False
    while why := unreachable(host, port):
        check()
        waited = time.monotonic() - began
        if waited > patience:
            raise missing(launch, waited, why)
        if waited > QUIET_SECONDS and not said:
            say(f"waiting up to {patience:.0f} s for machine 0 at {host}:{port} ({why})")
            said = True
        time.sleep(RETRY_SECONDS)


def unreachable(host: str, port: int) -> str:
    """Return why nobody can be reached at an address; empty if somebody listens there."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError as error:
        return (error.strerror or str(error) or type(error).__name__).lower()
    return ""


def missing(launch: Launch, waited: float, why: str) -> EnvironmentNotReady:
    """Return what to say when machine 0 was not reached in time."""
    host, port = launch.main_process_ip, launch.main_process_port
    if launch.machine_rank == 0:
        return EnvironmentNotReady(
            f"this is machine 0, but main_process_ip = {host} does not lead to it ({why})",
            "main_process_ip must be the address of machine 0; on every other machine set --machine_rank",
        )
    return EnvironmentNotReady(
        f"waited {waited:.0f} s for machine 0 at {host}:{port} ({why})",
        f"start --machine_rank=0 on the machine with the address {host}, and let TCP port {port} through its firewall",
    )


def quieten_torch() -> None:
    """Keep torch's own account of lost connections off the terminal of a launcher, which says it in a sentence."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
