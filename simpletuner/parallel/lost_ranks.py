"""Messages for unreachable ranks: gloo's and the store's texts name a line of C++, not a rank."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist

from simpletuner.launch.rendezvous import connection_error
from simpletuner.system.files.lease_record import Record, boot_id, pid_namespace, process_start

MOST_NAMED = 8
POLL_SECONDS = 0.1


def record_process(store: dist.Store, rank: int) -> None:
    """Let the other ranks look up which process this one is."""
    store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")
    store.set(f"start/{rank}", " ".join((boot_id(), pid_namespace(), str(os.getpid()), process_start(os.getpid()))))


def find_ended(store: dist.Store, ranks: Iterable[int]) -> list[int]:
    """Ranks with a process that has ended, as far as this machine and its pid namespace can see."""
    here, ended = [boot_id(), pid_namespace()], []
    for rank in ranks:
        if store.check([f"start/{rank}"]):
            *where, pid, start = store.get(f"start/{rank}").decode().split(" ")
            if where == here and process_start(int(pid)) != start:
                ended.append(rank)
    return ended


def find_lost(store: dist.Store, rank: int, size: int, wait_seconds: float, is_told: Callable[[], bool] | None) -> str:
    """Name the lost ranks after a failed collective; empty once `is_told`.

    Waits for `is_told`, if there is a launcher that will tell. Of ranks whose process has not ended on this
    machine, those are named that do not ask the same within `wait_seconds`.
    """
    others, end = [number for number in range(size) if number != rank], time.monotonic() + wait_seconds
    silent, gone, processes = others, list[int](), dict[int, str]()
    try:
        store.set(f"lost/{rank}", "1")
        processes = {number: store.get(f"process/{number}").decode() for number in others}
    except dist.DistError:  # rank 0 serves the store, except under torchrun
        silent = [number for number in others if number == 0] or others
    while time.monotonic() < end and (is_told is not None or not gone):
        if is_told is not None and is_told():
            return ""
        time.sleep(POLL_SECONDS)
        gone = [number for number in processes if has_ended(processes[number])]
        with suppress(dist.DistError):
            silent = [number for number in silent if not processes or not store.check([f"lost/{number}"])]
    if gone:
        return f"{named(gone, processes)}, which {'has' if len(gone) == 1 else 'have'} ended"
    return f"{named(silent or others, processes)}, without an answer"


def has_ended(process: str) -> bool:
    """True if a process of this machine (`host pid`) is gone; False for other machines' processes."""
    host, _, pid = process.rpartition(" ")
    return host == socket.gethostname() and not Record(host=host, pid=int(pid)).is_launcher_alive


def named(numbers: Sequence[int], processes: Mapping[int, str]) -> str:
    places = {number: processes[number].rpartition(" ") for number in numbers if number in processes}
    about = {number: f" (pid {pid} on {host})" for number, (host, _, pid) in places.items()}
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return ", ".join(f"rank {number}{about.get(number, '')}" for number in numbers[:MOST_NAMED]) + more


def join_problem(text: str, rank: int, environment: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Cause and hint for a rank that could not join, by the text of torch's error."""
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    place = f"{host}:{port}"
    if "Unable to find address for" in text or "Unable to find interface" in text:
        name = environment.get("GLOO_SOCKET_IFNAME", "")
        return f"this machine has no network interface {name}", "set GLOO_SOCKET_IFNAME to one of `ip addr`"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        other = "set another --main_process_port, or MASTER_PORT, for all ranks"
        return f"port {port} of this machine, where they meet, is in use", other
    if rank and port.isdecimal() and (why := connection_error(host, int(port))):
        return f"{place} cannot be reached ({why})", f"look at the output of rank 0, and whether {place} leads to it"
    if "timed out" in text.lower() or "timeout" in text.lower():
        return f"not all came to {place} within {seconds:.0f} s", "look at the output of the other ranks"
    return (
        f"connections between them fail (they meet at {place})",
        "look at the output of the other ranks, and at the network",
    )
