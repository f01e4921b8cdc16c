"""Rendezvous of machines, or of ranks: all register and compare their configuration before any of them starts
to work.

Number 0 registers first; the others compare their configuration with it before registering, so once all have
registered, all are equal. Whoever finds a difference publishes it, and all waiting processes exit with that
sentence. Machine 0 serves the TCP store for launchers, and afterwards for their ranks.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Queue
from typing import TYPE_CHECKING

from simpletuner.errors import EnvironmentNotReady, RemoteFailure, SettingsError, SimpleTunerError, Stopped
from simpletuner.launch.node_info import NodeInfo, difference, parse_node_info
from simpletuner.launch.plan import LOOPBACK, silence_torch
from simpletuner.launch.store import SECRET, MessageStore, sanitize
from simpletuner.launch.termination import failure_code
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.importing import no_collection
from simpletuner.system.network import listen_on_all_addresses

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.05
# Wait before a message says so.
NOTICE_SECONDS = 5
# How long number 0 waits for readers: of a run that begins, and of a refused one, where some may not come.
READERS_SECONDS, LINGER_SECONDS = 30, 2


@dataclass(frozen=True)
class Group:
    """Group of machines or ranks: `kind` is `machine` or `rank`, `number` is this one's, `count` the size."""

    kind: str
    number: int
    count: int

    @property
    def variable(self) -> str:
        """The source of each number: a setting, or a variable of the environment."""
        return {"machine": "machine_rank", "rank": "RANK"}[self.kind]

    def name(self, number: int) -> str:
        return f"{self.kind} {number}"

    def key(self, what: object) -> str:
        return f"agreement/{self.kind}/{what}"

    @property
    def members(self) -> dict[str, int]:
        """The number of each member, by the key under which it registers."""
        return {self.key(number): number for number in range(self.count)}


def verify_same_config(
    messages: MessageStore,
    group: Group,
    info: NodeInfo,
    check: Callable[[], None],
    timeout_seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> list[NodeInfo]:
    """Register, wait for all others, and return what each registered, by number.

    Raises the error of the member that found a difference, on all that wait. `check` may raise to stop
    waiting.
    """
    try:
        register(messages, group, info, check, timeout_seconds)
        infos = wait_for_all(messages, group, check, timeout_seconds, say)
    except SimpleTunerError as error:
        if not isinstance(error, RemoteFailure):
            reject(messages, group, error, info)
        wait_for_readers(messages, group, LINGER_SECONDS)
        raise
    wait_for_readers(messages, group, READERS_SECONDS, check)
    return infos


def register(
    messages: MessageStore, group: Group, info: NodeInfo, check: Callable[[], None], timeout_seconds: float
) -> None:
    """Compare with number 0, then register. Raises SettingsError when another process has the same number."""
    if group.number:
        end = time.monotonic() + timeout_seconds
        while not messages.store.all_exist([group.key(0)]) and time.monotonic() < end:
            poll(messages, group, check)
        first = read_first(messages, group) if messages.store.all_exist([group.key(0)]) else info
        if error := difference(first, group.name(0), info, group.name(group.number)):
            raise error
    holder = messages.put_first(group.key(group.number), info.as_json(), parse_node_info)
    if holder != info:
        raise SettingsError(
            f"{group.variable} = {group.number} is used twice: by {holder.host} (pid {holder.pid}) "
            f"and by {info.host} (pid {info.pid})",
            f"give every {group.kind} its own {group.variable}, from 0 to {group.count - 1}",
        )


def read_first(messages: MessageStore, group: Group) -> NodeInfo:
    """Read what number 0 registered. Raises SettingsError when it signs with another secret."""
    info = messages.read(group.key(0), parse_node_info)
    if info is None:
        secret = "another run secret, or none" if messages.signer.secret else "a run secret, which is not here"
        raise SettingsError(
            f"{group.name(0)} signs its messages with {secret}",
            f"give all machines the same secret, in {SECRET} or by --run_secret_file",
        )
    return info


def wait_for_all(
    messages: MessageStore,
    group: Group,
    check: Callable[[], None],
    timeout_seconds: float,
    say: Callable[[str], None],
) -> list[NodeInfo]:
    """Wait until all have registered. Raises EnvironmentNotReady, which names who is missing."""
    members, began, reported = group.members, time.monotonic(), False
    while True:
        waited = time.monotonic() - began
        notice = waited > NOTICE_SECONDS and not reported
        # one request per poll while somebody is missing: a thousand ranks would read a million keys
        if notice or waited > timeout_seconds or messages.store.all_exist(members):
            infos = messages.read_all(members, parse_node_info)
            if len(infos) == group.count:
                return [infos[key] for key in members]
            arrived = f"{len(infos)} of {group.count} {group.kind}s came"
            if waited > timeout_seconds:
                missing = ", ".join(group.name(number) for key, number in members.items() if key not in infos)
                raise EnvironmentNotReady(
                    f"waited {waited:.0f} s: {arrived}; missing: {missing}{describe_rejected(messages)}",
                    "look at the output there, or wait longer with --node_join_timeout",
                )
            if notice:
                say(f"{arrived}; waiting up to {timeout_seconds:.0f} s for the others")
                reported = True
        poll(messages, group, check)


def wait_for_readers(
    messages: MessageStore, group: Group, timeout_seconds: float, check: Callable[[], None] = lambda: None
) -> None:
    """Say that this member has read what there is; number 0, which may serve the store, waits for the others.

    What it has read may end it at once: without this, others were told that they lost contact to rank 0.
    """
    from torch.distributed import DistError

    readers = {number: group.key(f"{number}/has read") for number in range(1, group.count)}
    end = time.monotonic() + timeout_seconds
    with suppress(DistError):  # whoever serves the store has gone: that is found later, or known already
        if group.number:
            messages.store.set(readers[group.number], "")
            return
        while readers and not messages.store.all_exist(readers.values()) and time.monotonic() < end:
            check()
            time.sleep(POLL_SECONDS / 10)


def describe_rejected(messages: MessageStore) -> str:
    if not messages.rejected_key:
        return ""
    return f" (ignored what was not signed with the secret of this run, such as `{messages.rejected_key}`)"


def poll(messages: MessageStore, group: Group, check: Callable[[], None]) -> None:
    """Sleep for a moment. Raises RemoteFailure when another member has rejected the run."""
    check()
    if rejection := messages.read(group.key("refused"), parse_rejection):
        raise rejection
    time.sleep(POLL_SECONDS)


def reject(messages: MessageStore, group: Group, error: SimpleTunerError, info: NodeInfo) -> None:
    """Publish, for all that wait, why there will be no run."""
    # a signal says nothing about where it came from; errors of configuration name both places themselves
    place = f"{group.name(group.number)} ({info.host}): " if isinstance(error, Stopped) else ""
    rejection = {"exit_code": int(error.exit_code), "message": place + error.message, "hint": error.hint}
    # The first one counts, so that all exit with the same sentence.
    messages.put_first(group.key("refused"), rejection, parse_rejection)


def parse_rejection(values: Mapping[str, object]) -> RemoteFailure | None:
    match values:
        case {"exit_code": int(code), "message": str(message), "hint": str(hint)}:
            return RemoteFailure(failure_code(code), sanitize(message), sanitize(hint))
    return None


STORE_SECONDS = 30
"""Longest wait for an answer from the store once its machine has been reached."""
# Seconds for machine 0 to reach itself at the address that the others use.
OWN_ADDRESS_SECONDS = 5
RETRY_SECONDS = 0.5


def serve(launch: Launch) -> TCPStore:
    """Serve a store: on main_process_port, or for a single machine on a free port of the loopback device.

    Raises EnvironmentNotReady when the port cannot be used.
    """
    silence_torch(os.environ)
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
    """Connect to machine 0's store, waiting for its start. Raises EnvironmentNotReady at the timeout."""
    silence_torch(os.environ)
    wait_for_machine_0(launch, check, say)
    host, port = launch.main_process_ip, launch.main_process_port
    # The constructor cannot be interrupted: in a thread, Ctrl-C still works, and a server of another kind,
    # which never answers, is found at the timeout.
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
    while why := connection_error(host, port):
        check()
        waited = time.monotonic() - began
        if waited > timeout:
            raise machine_0_not_reached(launch, waited, why)
        if waited > NOTICE_SECONDS and not reported:
            say(f"waiting up to {timeout:.0f} s for machine 0 at {host}:{port} ({why})")
            reported = True
        time.sleep(RETRY_SECONDS)


def connection_error(host: str, port: int) -> str:
    """Reason why connecting to an address fails; empty if it succeeds."""
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
