"""The TCP store that machine 0 serves: launchers rendezvous through it, and their ranks use it afterwards."""

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
from simpletuner.launch.rendezvous import NOTICE_SECONDS, POLL_SECONDS
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.importing import no_collection
from simpletuner.system.network import listen_on_all_addresses

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_SECONDS = 30
"""Longest wait for an answer from the store once its machine has been reached."""
OWN_ADDRESS_SECONDS = 5
"""Time in which machine 0 tries to reach itself at the address that the others use."""
RETRY_SECONDS = 0.5


def serve(launch: Launch) -> TCPStore:
    """Serve a store: on main_process_port, or for a single machine on a free port of the loopback device.

    Raises EnvironmentNotReady when the port cannot be used.
    """
    silence_torch()
    with no_collection():
        from torch.distributed import TCPStore

    several = launch.num_machines > 1
    wanted = launch.main_process_port if several else 0
    try:
        # A single machine listens where no other one reaches it, and several runs share it by free ports.
        listener = listen_on_all_addresses(wanted) if several else socket.create_server((LOOPBACK, 0))
    except OSError as error:
        raise EnvironmentNotReady(
            f"port {wanted} on machine 0 cannot be used: {os.strerror(error.errno or 0).lower()}",
            f"another run may be using it; choose another port on all machines: --main_process_port={wanted + 1}",
        ) from None
    # Bound here and handed over: between looking for a free port and serving on it, nobody can take it.
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=STORE_SECONDS),
        wait_for_workers=False,  # launchers arrive in any order, and ranks connect later
        master_listen_fd=listener.detach(),
    )


def connect(launch: Launch, check: Callable[[], None], say: Callable[[str], None]) -> TCPStore:
    """Connect to the store of machine 0, waiting for it to start. Raises EnvironmentNotReady at the timeout."""
    silence_torch()
    wait_for_machine_0(launch, check, say)
    host, port = launch.main_process_ip, launch.main_process_port
    # The constructor cannot be interrupted: in a thread, Ctrl-C still works, and a server of another kind, which never
    # answers, is found at the timeout.
    connected: Queue[TCPStore | None] = Queue()
    threading.Thread(target=open_store, args=(host, port, connected), daemon=True).start()
    end = time.monotonic() + STORE_SECONDS
    while connected.empty() and time.monotonic() < end:
        check()
        time.sleep(POLL_SECONDS)
    store = None if connected.empty() else connected.get()
    if store is None:
        raise EnvironmentNotReady(
            f"something else than machine 0 of a run answers at {host}:{port}",
            f"choose another port on all machines, such as --main_process_port={port + 1}",
        )
    return store


def open_store(host: str, port: int, connected: Queue[TCPStore | None]) -> None:
    """Put a connected store into the queue, or None if connecting fails."""
    with no_collection():
        from torch.distributed import DistError, TCPStore

    try:
        connected.put(TCPStore(host, port, timeout=timedelta(seconds=STORE_SECONDS), wait_for_workers=False))
    except DistError:
        connected.put(None)


def wait_for_machine_0(launch: Launch, check: Callable[[], None], say: Callable[[str], None]) -> None:
    host, port = launch.main_process_ip, launch.main_process_port
    timeout = launch.node_join_timeout if launch.machine_rank else min(OWN_ADDRESS_SECONDS, launch.node_join_timeout)
    began, reported = time.monotonic(), False
    while why := why_unreachable(host, port):
        check()
        waited = time.monotonic() - began
        if waited > timeout:
            raise machine_0_not_reached(launch, waited, why)
        if waited > NOTICE_SECONDS and not reported:
            say(f"waiting up to {timeout:.0f} s for machine 0 at {host}:{port} ({why})")
            reported = True
        time.sleep(RETRY_SECONDS)


def why_unreachable(host: str, port: int) -> str:
    """Return why connecting to an address fails; empty if it succeeds."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError as error:
        return (error.strerror or str(error) or type(error).__name__).lower()
    return ""


def machine_0_not_reached(launch: Launch, waited: float, why: str) -> EnvironmentNotReady:
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


def silence_torch() -> None:
    """Keep torch from printing stack traces about lost connections, which the launcher reports in one sentence."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
