"""All checks in order on one node, and the result that all nodes share."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner.errors import ExitCode
from simpletuner.system.signals import StopRequest
from simpletuner.tools.nfs.capacity import check_space, check_speed
from simpletuner.tools.nfs.filesystems import check_mount, mount_of_node, reach_of
from simpletuner.tools.nfs.mounts import Mount
from simpletuner.tools.nfs.port import check_port
from simpletuner.tools.nfs.posix_semantics import check_delete, check_exclusive, check_lock, check_rename, check_write
from simpletuner.tools.nfs.rendezvous import Node, Rendezvous, RendezvousError
from simpletuner.tools.nfs.results import (
    CHECKS,
    Finding,
    Status,
    explain_errno,
    failed,
    format_ranks,
    parse_finding,
    skipped,
    worst,
)
from simpletuner.tools.nfs.visibility import Pong, check_clock, check_identity, check_see, exchange_pings
from simpletuner.tools.nfs.workspace import Workspace, cleanup_after_kill

UNRESPONSIVE_SECONDS = 10.0
"""After how long the watchdog says that the filesystem does not answer."""


@dataclass(frozen=True)
class CheckOutcome:
    """What this node found, and what every other node that finished found."""

    node: Node
    findings: tuple[Finding, ...]
    others: dict[int, tuple[Finding, ...]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    @property
    def status(self) -> Status:
        """The worst status of all nodes; a node without a result has failed."""
        found = [*self.findings, *(finding for findings in self.others.values() for finding in findings)]
        return Status.FAIL if self.silent else worst(found)

    def as_json(self) -> dict[str, Any]:
        """For scripts; the format is described in docs/nfs.md."""
        return {
            "path": str(self.node.path),
            "status": str(self.status),
            "nodes": self.node.nodes,
            "node_rank": self.node.rank,
            "checks": [finding.as_json() for finding in self.findings],
            "others": [
                {"node_rank": rank, "status": str(worst(found)), "checks": [finding.as_json() for finding in found]}
                for rank, found in sorted(self.others.items())
            ],
            "silent": list(self.silent),
        }


def check(node: Node, stop: StopRequest, say: Callable[[str], None]) -> CheckOutcome:
    """Check a folder together with the other nodes, and leave nothing behind.

    `say` prints which nodes are missing, and whether the filesystem does not answer. Raises Stopped after a signal.
    """
    node = replace(node, path=Path(os.path.realpath(node.path.expanduser())))
    workspace = Workspace(node.path)
    peers = Rendezvous(workspace, node, stop)
    with cleanup_after_kill(workspace, node.rank, peers.info.nonce), watchdog(peers, say):
        try:
            return CheckRun(node, workspace, peers, say).run()
        finally:
            peers.leave()


class CheckRun:
    """One run of all checks on one node, with what they have found so far."""

    def __init__(self, node: Node, workspace: Workspace, peers: Rendezvous, say: Callable[[str], None]) -> None:
        self.node, self.workspace, self.peers, self.say = node, workspace, peers, say
        self.findings: dict[str, Finding] = {}
        self.pongs: list[list[Pong]] = []
        self.reaches: dict[int, str] = {}

    def run(self) -> CheckOutcome:
        """Make every check that is possible, and share the results."""
        self.findings["write"] = check_write(self.node, self.workspace)
        mount = mount_of_node(self.node)
        joined = self.join(mount)
        if joined:
            self.check_together()
        # last: a local filesystem is right on one node, if the others see its files through a shared one
        self.findings["mount"] = check_mount(self.node, mount, self.reaches)
        self.attempt("space", lambda: check_space(self.node))
        return self.share() if joined else self.outcome({})

    def join(self, mount: Mount | None) -> bool:
        """Find the others, and check `see`; return whether the checks that need all nodes are possible."""
        self.peers.stage = "see"
        try:
            self.peers.register()
            self.peers.join(self.report_missing)
            reaches = self.peers.gather("reach", str(reach_of(mount)))
            self.pongs = exchange_pings(self.node, self.peers)
            self.peers.gather("end")
        except OSError as error:
            sentence, fix = explain_errno(error, self.node.path)
            self.findings["see"] = failed("see", f"cannot meet: {sentence}", fix)
        except RendezvousError as error:
            self.findings["see"] = failed("see", str(error), *self.commands(error.ranks))
        else:
            self.reaches = {rank: reaches[rank] for rank in self.node.others}
            self.findings["see"] = check_see(self.node, self.pongs)
            return True
        self.peers.post_failure()
        return False

    def report_missing(self, missing: list[int]) -> None:
        """Print who is late, and what to start there."""
        self.say(f"waiting up to {self.node.timeout_seconds:g} s for {format_ranks(missing)}:")
        for command in self.commands(missing):
            self.say(f"  {command}")

    def commands(self, ranks: Iterable[int]) -> list[str]:
        missing = [f"on node {rank}: {self.node.command_of(rank)}" for rank in ranks if rank != self.node.rank]
        return missing or ["give every node its own --node-rank, from 0 to nodes - 1, and the same --nodes"]

    def check_together(self) -> None:
        """Make the checks for which nodes work together. All nodes make them in this order."""
        node, peers, pongs = self.node, self.peers, self.pongs
        self.attempt("rename", lambda: check_rename(node, peers))
        self.attempt("exclusive", lambda: check_exclusive(node, peers))
        self.attempt("lock", lambda: check_lock(node, peers))
        self.attempt("delete", lambda: check_delete(node, peers))
        self.attempt("identity", lambda: check_identity(node, peers, pongs))
        self.attempt("clock", lambda: check_clock(node, peers, pongs))
        self.attempt("speed", lambda: check_speed(node, peers))
        self.attempt("port", lambda: check_port(node, peers))

    def attempt(self, name: str, make: Callable[[], Finding]) -> None:
        """Make one check; an error of the filesystem, or a node that is gone, becomes its finding."""
        self.peers.stage = name
        try:
            self.findings[name] = make()
            return
        except OSError as error:
            sentence, fix = explain_errno(error, self.node.path)
            self.findings[name] = failed(name, sentence, fix)
        except RendezvousError as error:
            self.findings[name] = failed(name, f"not finished: {error}", "see the report of that node")
        self.peers.post_failure()

    def share(self) -> CheckOutcome:
        """Publish this node's findings, and return them with those of all others."""
        self.peers.stage = "outcome"
        posted: dict[int, list[dict[str, Any]]] = {}
        with contextlib.suppress(OSError):  # a folder that fails even now has been found wrong by the checks
            self.peers.post("findings", [finding.as_json() for finding in self.ordered()])
            for other in self.node.others:
                with contextlib.suppress(RendezvousError):  # the outcome lists it as silent
                    posted |= self.peers.wait("findings", [other])
            self.peers.drain()
        return self.outcome({rank: tuple(map(parse_finding, found)) for rank, found in posted.items()})

    def outcome(self, others: dict[int, tuple[Finding, ...]]) -> CheckOutcome:
        silent = tuple(rank for rank in self.node.others if rank not in others)
        return CheckOutcome(self.node, self.ordered(), others, silent)

    def ordered(self) -> tuple[Finding, ...]:
        """One finding for each check, in the order of the table."""
        why = "not checked: the nodes did not meet"
        return tuple(self.findings.get(name) or skipped(name, why) for name in CHECKS)


@contextmanager
def watchdog(rendezvous: Rendezvous, say: Callable[[str], None]) -> Iterator[None]:
    """Report when the filesystem does not answer, and exit at the timeout, with the exit code of a failed check.

    If a file server is down, system calls do not fail, they block, and the thread in one cannot handle a signal.
    """
    closed, reported = threading.Event(), threading.Event()
    path, timeout = rendezvous.workspace.path, rendezvous.node.timeout_seconds

    def watch() -> None:
        while not closed.wait(0.5):
            silence = time.monotonic() - rendezvous.last_progress
            where = f"{path} has not answered for {silence:.0f} s (in `{rendezvous.stage}`)"
            if silence > timeout:
                say(f"error: {where}: given up")
                say(f"hint: is its file server up? findmnt -T {path}")
                os._exit(int(ExitCode.ENVIRONMENT))
            if silence > UNRESPONSIVE_SECONDS and not reported.is_set():
                reported.set()
                say(f"{where}; waiting up to {timeout:g} s")

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
