"""Rendezvous of nodes in a shared folder: they find each other, exchange values, and notice who has gone.

A folder, unlike the store of a run, may still hold what a dead session left. So a node registers with a
random nonce, and two nodes have found each other once each has acknowledged the other's nonce: a dead process
acknowledges nothing.

A client lists a folder from its cache until it changes the folder itself. Each heartbeat is such a change.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletuner.launch.node_info import NodeInfo, identify, parse_node_info
from simpletuner.launch.store import MessageStore
from simpletuner.system.files.mounts import MOUNTINFO
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.nfs.results import format_ranks
from simpletuner.tools.nfs.workspace import FolderStore, Workspace, arriving, card_key, invalidate_dir_cache

if TYPE_CHECKING:
    from simpletuner.checkpoints.disk_usage import DiskUsage
    from simpletuner.tools.nfs.visibility import Pong

HEARTBEAT_SECONDS = 0.1
# A registered node without a new heartbeat for this long is dead.
STALE_SECONDS = 3.0
CLAIM_ATTEMPTS = 20


@dataclass(frozen=True)
class Node:
    """A node of the check; `address` and `port` are where the run's machine 0 listens.

    Tests replace clock, locks and the list of mounts by broken ones.
    """

    path: Path
    rank: int = 0
    nodes: int = 1
    timeout_seconds: float = 60.0
    address: str = ""
    port: int = 29500
    disk_usage: DiskUsage | None = None
    disk_unknown: str = "name the model with --model_family, or a folder of weights"
    """Why `disk_usage` is None."""
    clock: Callable[[], float] = time.time
    flock: Callable[[int, int], None] = fcntl.flock
    mountinfo: Path = MOUNTINFO

    @property
    def is_alone(self) -> bool:
        return self.nodes == 1

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.nodes) if rank != self.rank]

    def commands(self, ranks: Iterable[int]) -> list[str]:
        start = f"simpletuner nfs check --path={self.path} --nodes={self.nodes} --node-rank="
        missing = [f"on node {rank}: {start}{rank}" for rank in ranks if rank != self.rank]
        return missing or ["give every node its own --node-rank, from 0 to nodes - 1, and the same --nodes"]


class RendezvousError(Exception):
    """The end of a wait for nodes that will not answer; `ranks` are these nodes."""

    def __init__(self, sentence: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(sentence)
        self.ranks = sorted(ranks)


class Rendezvous:
    """A node's view of the check and of the other nodes; `stage` is the name of the present check."""

    def __init__(self, node: Node, stop: StopRequest, say: Callable[[str], None]) -> None:
        self.node = node
        self.stop = stop
        self.say = say
        self.workspace = Workspace(node.path)
        self.info = identify({"nodes": node.nodes}, {})
        self.store = FolderStore(self.workspace.folder)
        self.messages = MessageStore(self.store)
        self.stage = "write"
        self.last_progress = time.monotonic()
        """Time at which this node was last seen not to be blocked in a system call."""
        self.is_registered = False
        self.reaches: dict[int, str] = {}
        """Visibility of each node's mount (`mounts.MountScope`); empty where the nodes did not meet."""
        self.rounds: list[list[Pong]] = []
        """Answers of the other nodes to this one's pings."""
        self.infos: dict[int, NodeInfo] = {node.rank: self.info}
        self._heartbeat_key = f"{node.rank}-beat"
        self._joined: set[int] = set()
        self._lost: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def register(self) -> None:
        """Register under this node's rank. Raises RendezvousError when another process has it, or OSError."""
        rank = self.node.rank
        mine = self.messages.signer.encode(card_key(rank), self.info.as_json())

        def claim() -> bool:
            self.workspace.create()
            if self.store.compare_set(card_key(rank), b"", mine) == mine.encode():
                return True
            self._wait_until_stale()
            self.workspace.leave(rank)
            return False

        for _ in range(CLAIM_ATTEMPTS):
            if arriving(claim):
                self.is_registered = True
                self._thread.start()
                return
        raise RendezvousError(f"node rank {rank} is claimed again and again by other processes", [rank])

    def join(self) -> None:
        """Wait for all others, and say who is late. Raises RendezvousError at the timeout."""
        reported = False
        missing = self.node.others
        timeout = self.node.timeout_seconds
        for waited in self.polls():
            missing = self._missing()
            if not missing:
                return
            if waited > 1 and not reported:
                reported = True
                self.say(f"waiting up to {timeout:g} s for {format_ranks(missing)}:")
                for command in self.node.commands(missing):
                    self.say(f"  {command}")
        late = set(missing) - self._joined or missing  # one that joined may have timed out before us
        raise RendezvousError(f"{format_ranks(late)} did not come within {timeout:g} s", late)

    def post(self, name: str, value: object = None) -> None:
        self.messages.write(self._key(self.node.rank, name), {"value": value})

    def wait(self, name: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Return the values that nodes posted under a name. Raises RendezvousError when one failed, left, or
        is too late."""
        pending, values = set(ranks), {}
        for _ in self.polls():
            posts = {self._key(rank, name): rank for rank in pending}
            signs = [key for rank in pending for key in (self._key(rank, "failed"), self._acknowledgement_by(rank))]
            existing = self.store.existing([*posts, *signs])
            if ready := existing & posts.keys():
                values |= {posts[key]: post["value"] for key, post in self.messages.read_all(ready, dict).items()}
            pending -= values.keys()
            if not pending:
                return values
            for other in sorted(pending):
                if self._key(other, "failed") in existing:
                    raise RendezvousError(f"node {other} could not go on", [other])
                if other in self._lost or self._acknowledgement_by(other) not in existing:
                    raise RendezvousError(f"node {other} ended before it was through", [other])
        self._lost |= pending  # do not wait for them again
        raise RendezvousError(f"{format_ranks(pending)} said nothing for {self.node.timeout_seconds:g} s", pending)

    def gather(self, name: str, value: object = None) -> dict[int, Any]:
        self.post(name, value)
        return {self.node.rank: value, **self.wait(name, self.node.others)}

    def available(self, name: str) -> Iterator[tuple[int, Any]]:
        """Wait for each of the others in turn; yield rank and value of those that answered."""
        for other in self.node.others:
            with contextlib.suppress(RendezvousError):
                yield other, self.wait(name, [other])[other]

    def post_failure(self) -> None:
        """Tell the others not to wait for this node in the present stage."""
        if self.is_registered:  # otherwise the rank, and the files that begin with it, may be another process's
            with contextlib.suppress(OSError):
                self.post("failed")

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Stopped when a signal came."""
        self.last_progress = time.monotonic()
        if self.stop.signal_number:
            raise self.stop.stopped("during nfs check")
        time.sleep(seconds)

    def polls(self, seconds: float | None = None) -> Iterator[float]:
        """Yield the seconds waited so far, with ever longer pauses, up to a limit (the node's timeout)."""
        limit = self.node.timeout_seconds if seconds is None else seconds
        began = time.monotonic()
        waited = 0.0
        while True:
            yield waited
            if waited > limit:
                return
            self.pause(min(0.05, 0.002 + waited / 20))
            waited = time.monotonic() - began

    def drain(self) -> None:
        """Wait until every other node has read everything, or has left."""
        self.stage = "end"
        self.post("read")
        list(self.available("read"))
        # only the owner of the folder may remove it, so nodes of other users leave first
        if self.workspace.folder.stat().st_uid == self.info.uid:
            foreign = [card_key(other) for other in self.node.others if self.infos[other].uid != self.info.uid]
            for _ in self.polls(STALE_SECONDS):
                if not self.store.existing(foreign):
                    return

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
        """Acknowledge new registrations; return the nodes that have not acknowledged this one's.

        Raises RendezvousError when another node has been given another number of nodes.
        """
        cards = {card_key(other): other for other in self.node.others}
        registered = {cards[key]: info for key, info in self.messages.read_all(cards, parse_node_info).items()}
        for other, info in registered.items():
            if other not in self.infos or info.nonce != self.infos[other].nonce:
                self.infos[other] = info
                self.store.set(f"{self.node.rank}-met.{info.nonce}", "")
        signs = {other: self._acknowledgement_by(other) for other in self.node.others if other in self.infos}
        existing = self.store.existing(signs.values())
        met = [other for other, sign in signs.items() if sign in existing]
        self._joined.update(met)
        for other in met:
            nodes = self.infos[other].settings.get("nodes")
            if nodes != self.node.nodes:
                self.pause(1)  # let the other node see this one, too, before its card is removed
                sentence = f"node {other} was started with --nodes {nodes}, this one with --nodes {self.node.nodes}"
                raise RendezvousError(sentence)
        return [other for other in self.node.others if other not in met or other not in registered]

    def _acknowledgement_by(self, other: int) -> str:
        return f"{other}-met.{self.info.nonce}"

    def _wait_until_stale(self) -> None:
        """Return once the holder of this rank is known to be dead. Raises RendezvousError if it lives."""
        rank = self.node.rank
        before = self.messages.read(self._heartbeat_key, dict)
        for _ in self.polls(STALE_SECONDS):
            holder = self.messages.read(card_key(rank), parse_node_info)
            if holder and holder.has_ended:
                return
            heartbeat = self.messages.read(self._heartbeat_key, dict)
            if holder and heartbeat and heartbeat != before:
                who = f"process {holder.pid} on {holder.host}"
                raise RendezvousError(f"node rank {rank} is already taken by {who}", [rank])
            invalidate_dir_cache(self.workspace.folder)

    def _send_heartbeats(self) -> None:
        for count in itertools.count(1):
            with contextlib.suppress(OSError):  # the checks find and report what is wrong with the folder
                self.messages.write(self._heartbeat_key, {"count": count})
            if self._closed.wait(HEARTBEAT_SECONDS):
                return

    def _key(self, rank: int, name: str) -> str:
        return f"{rank}-{self.infos[rank].nonce}.{self.stage}.{name}"
