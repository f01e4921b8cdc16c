"""How nodes find each other in a shared folder, exchange values, and notice who has gone.

A folder, unlike the store of a run, may still hold what a dead session left. So a node registers with a random nonce,
and two nodes have found each other once each has acknowledged the other's nonce: a dead process acknowledges nothing.

A client lists a folder from its cache until it changes the folder itself. Each heartbeat is such a change, so nodes
that wait send theirs more often.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.launch.heartbeat import Heartbeat, parse_heartbeat
from simpletuner.launch.node_info import NodeInfo, identify, parse_node_info
from simpletuner.launch.store import MessageStore
from simpletuner.system.signals import StopRequest
from simpletuner.tools.nfs.mounts import MOUNTINFO
from simpletuner.tools.nfs.results import format_ranks
from simpletuner.tools.nfs.workspace import FolderStore, Workspace, card_key, invalidate_dir_cache

if TYPE_CHECKING:
    from simpletuner.tools.nfs.capacity import DiskUsage

HEARTBEAT_SECONDS = 0.5
WAITING_HEARTBEAT_SECONDS = 0.1
STALE_SECONDS = 3.0
"""A registered node without a new heartbeat for this long is dead."""
CLAIM_ATTEMPTS = 20


@dataclass(frozen=True)
class Node:
    """What one node checks; `address` and `port` are where the run's machine 0 listens.

    Tests replace clock, locks and the list of mounts by broken ones.
    """

    path: Path
    rank: int = 0
    nodes: int = 1
    timeout_seconds: float = 60.0
    size_mib: int | None = None
    address: str = ""
    port: int = 29500
    disk_usage: DiskUsage | None = None
    clock: Callable[[], float] = time.time
    flock: Callable[[int, int], None] = fcntl.flock
    mountinfo: Path = MOUNTINFO

    @property
    def is_alone(self) -> bool:
        return self.nodes == 1

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.nodes) if rank != self.rank]

    def command_of(self, rank: int) -> str:
        """Return what to type on another node."""
        return f"simpletuner nfs check --path={self.path} --nodes={self.nodes} --node-rank={rank}"


class RendezvousError(Exception):
    """What was waited for will not come; `ranks` are the nodes that it would have come from."""

    def __init__(self, sentence: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(sentence)
        self.ranks = sorted(ranks)


class Rendezvous:
    """One node's side of the rendezvous; `stage` is the name of the present check."""

    def __init__(self, workspace: Workspace, node: Node, stop: StopRequest) -> None:
        self.workspace, self.node, self.stop = workspace, node, stop
        self.info = identify({"nodes": node.nodes}, {})
        self.store = FolderStore(workspace.folder)
        self.messages = MessageStore(self.store)
        self.stage = "write"
        self.last_progress = time.monotonic()
        """When this node was last seen not to be blocked in a system call."""
        self.is_registered = False
        self._infos: dict[int, NodeInfo] = {}
        self._joined: set[int] = set()
        self._lost: set[int] = set()
        self._count, self._last_heartbeat = 0, 0.0
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def register(self) -> None:
        """Register under this node's rank. Raises RendezvousError when another process has it, or OSError."""
        rank = self.node.rank
        mine = self.messages.signer.encode(card_key(rank), self.info.as_json())
        for attempts_left in reversed(range(CLAIM_ATTEMPTS)):
            try:
                self.workspace.create()
                if self.store.compare_set(card_key(rank), b"", mine) == mine.encode():
                    break
            except FileNotFoundError:  # the last node of an earlier check has just removed the folder
                if not attempts_left:
                    raise
                continue
            self._wait_until_stale()
            self.workspace.clear(rank)
        else:
            raise RendezvousError(f"node rank {rank} is claimed again and again by other processes", [rank])
        self.is_registered = True
        self._send_heartbeat()
        self._thread.start()

    def join(self, on_wait: Callable[[list[int]], None]) -> None:
        """Wait for all others. Calls `on_wait` once with those that are late; raises RendezvousError at the timeout."""
        began, reported, timeout = time.monotonic(), False, self.node.timeout_seconds
        while missing := self._missing():
            seconds = time.monotonic() - began
            if seconds > timeout:
                late = set(missing) - self._joined or missing  # one that joined may have timed out before us
                raise RendezvousError(f"{format_ranks(late)} did not come within {timeout:g} s", late)
            if seconds > 1 and not reported:
                on_wait(missing)
                reported = True
            self._poll(0.02)

    def post(self, name: str, value: Any = None) -> None:
        """Publish a value under a name of the present stage."""
        self.messages.write(self._key(self.node.rank, name), {"value": value})

    def wait(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what all others posted under a name. Raises RendezvousError when one failed, left, or is too late."""
        pending, values = set(self.node.others if ranks is None else ranks), {}
        deadline, pause_seconds = time.monotonic() + self.node.timeout_seconds, 0.002
        while True:
            posts = {rank: self._key(rank, name) for rank in pending}
            signs = [key for rank in pending for key in (self._key(rank, "failed"), self._acknowledgement_by(rank))]
            existing = self.store.existing([*posts.values(), *signs])
            if ready := [key for key in posts.values() if key in existing]:
                found = self.messages.read_all(ready, dict)
                values |= {rank: found[key]["value"] for rank, key in posts.items() if key in found}
            pending -= set(values)
            if not pending:
                return values
            self._check_peers(pending, existing, deadline)
            self._poll(pause_seconds)
            pause_seconds = min(0.05, pause_seconds * 1.2)

    def gather(self, name: str, value: Any = None) -> dict[int, Any]:
        """Post a value and return those of all nodes, including this one's."""
        self.post(name, value)
        return {self.node.rank: value, **self.wait(name)}

    def stat_new_file(self) -> os.stat_result:
        """Return owner and times that the filesystem gives to a file that this node has just written."""
        self.post("stamp")
        return self.store.path_of(self._key(self.node.rank, "stamp")).stat()

    def post_failure(self) -> None:
        """Tell the others not to wait for this node in the present stage."""
        if self.is_registered:  # otherwise the rank, and the files that begin with it, may be another process's
            with contextlib.suppress(OSError):
                self.post("failed")

    def nonce_of(self, other: int) -> str:
        return self._infos[other].nonce

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Stopped when a signal came."""
        self.last_progress = time.monotonic()
        if self.stop.signal_number:
            raise self.stop.stopped("during nfs check")
        time.sleep(seconds)

    def drain(self) -> None:
        """Wait until every other node has read everything, or has left."""
        self.stage = "end"
        self.post("read")
        for other in self.node.others:
            with contextlib.suppress(RendezvousError):
                self.wait("read", [other])
        self._wait_for_other_users()

    def leave(self) -> None:
        """Stop the heartbeat, and remove all that this node wrote."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.is_registered:
            self.workspace.leave(self.node.rank)
        else:
            self.workspace.remove_if_empty()

    def _missing(self) -> list[int]:
        """Acknowledge new registrations; return the nodes that have not acknowledged this one's."""
        others = self.node.others
        infos = self.messages.read_all([card_key(other) for other in others], parse_node_info)
        for other in others:
            info = infos.get(card_key(other))
            if info and (other not in self._infos or info.nonce != self.nonce_of(other)):
                self._infos[other] = info
                self.store.set(f"{self.node.rank}-met.{info.nonce}", "")
        existing = self.store.existing([self._acknowledgement_by(other) for other in others])
        return [other for other in others if not self._has_joined(other, existing, card_key(other) in infos)]

    def _has_joined(self, other: int, existing: set[str], is_registered: bool) -> bool:
        """Return whether a node has acknowledged this one. Raises RendezvousError if its number of nodes differs."""
        if self._acknowledgement_by(other) not in existing or other not in self._infos:
            return False
        self._joined.add(other)
        nodes = self._infos[other].settings.get("nodes")
        if nodes != self.node.nodes:
            self.pause(2 * HEARTBEAT_SECONDS)  # let the other node see this one, too, before its card is removed
            raise RendezvousError(
                f"node {other} was started with --nodes {nodes}, this one with --nodes {self.node.nodes}"
            )
        return is_registered

    def _acknowledgement_by(self, other: int) -> str:
        return f"{other}-met.{self.info.nonce}"

    def _check_peers(self, pending: set[int], existing: set[str], deadline: float) -> None:
        """Raise RendezvousError when there is nothing left to wait for."""
        for other in sorted(pending):
            if self._key(other, "failed") in existing:
                raise RendezvousError(f"node {other} could not go on", [other])
            if other in self._lost or self._acknowledgement_by(other) not in existing:
                raise RendezvousError(f"node {other} ended before it was through", [other])
        if time.monotonic() > deadline:
            self._lost |= pending  # do not wait for them again
            sentence = f"{format_ranks(pending)} said nothing for {self.node.timeout_seconds:g} s"
            raise RendezvousError(sentence, pending)

    def _wait_for_other_users(self) -> None:
        """Wait for nodes of other users to leave if the folder is this user's: only its owner may remove it."""
        ends, me = time.monotonic() + STALE_SECONDS, os.geteuid()
        foreign = [card_key(other) for other in self.node.others if self._infos[other].uid != me]
        if self.workspace.folder.stat().st_uid == me:
            while foreign and self.store.existing(foreign) and time.monotonic() < ends:
                self._poll(0.02)

    def _wait_until_stale(self) -> None:
        """Return once the process that holds this rank is known to be dead. Raises RendezvousError if it is alive."""
        rank, ends = self.node.rank, time.monotonic() + STALE_SECONDS
        before = self.messages.read(heartbeat_key(rank), parse_heartbeat)
        while time.monotonic() < ends:
            holder = self.messages.read(card_key(rank), parse_node_info)
            if holder and holder.has_ended:
                return
            heartbeat = self.messages.read(heartbeat_key(rank), parse_heartbeat)
            if holder and heartbeat and heartbeat != before:
                who = f"process {holder.pid} on {holder.host}"
                raise RendezvousError(f"node rank {rank} is already taken by {who}", [rank])
            invalidate_dir_cache(self.workspace.folder)
            self.pause(0.05)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # the checks find and report what is wrong with the folder
                self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        with self._sending:
            self._last_heartbeat = time.monotonic()
            self._count += 1
            self.messages.write(heartbeat_key(self.node.rank), asdict(Heartbeat(self._count)))

    def _poll(self, seconds: float) -> None:
        """Pause before the folder is listed again, with a heartbeat now and then so that the listing is fresh."""
        self.pause(seconds)
        if time.monotonic() - self._last_heartbeat > WAITING_HEARTBEAT_SECONDS:
            self._send_heartbeat()

    def _key(self, rank: int, name: str) -> str:
        """Return the key of a post in the present stage."""
        nonce = self.info.nonce if rank == self.node.rank else self.nonce_of(rank)
        return f"{rank}-{nonce}.{self.stage}.{name}"


def heartbeat_key(rank: int) -> str:
    return f"{rank}-beat"
