"""All checks in order on one node, and the result that all nodes share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from simpletuner.errors import ExitCode
from simpletuner.system.files.late_files import SHORTER_CACHES
from simpletuner.system.processes.signals import StopRequest
from simpletuner.tools.nfs import mounts, posix_semantics, resources, visibility
from simpletuner.tools.nfs.rendezvous import Node, Rendezvous, RendezvousError
from simpletuner.tools.nfs.results import CHECKS, Finding, Status, explain_errno, failed, parse_finding, skipped, worst
from simpletuner.tools.nfs.workspace import cleanup_after_kill

# After how long the watchdog says that the filesystem does not answer.
UNRESPONSIVE_SECONDS = 10.0

Check = Callable[[Rendezvous], Finding]
IN_ORDER: dict[str, Check] = {
    "write": posix_semantics.check_write,
    "see": visibility.check_see,
    "rename": posix_semantics.check_rename,
    "lock": posix_semantics.check_lock,
    "identity": visibility.check_identity,
    "clock": visibility.check_clock,
    "port": resources.check_port,
    # last: a local filesystem is right on one node, if the others see its files through a shared one
    "mount": lambda peers: mounts.check_mount(peers.node, mounts.mount_of_node(peers.node), peers.reaches),
    "space": lambda peers: resources.check_space(peers.node),
}
"""The checks, in the order that all nodes follow."""
# Checks that are made even if the nodes do not meet.
INDEPENDENT = ("write", "see", "mount", "space")


@dataclass(frozen=True)
class CheckOutcome:
    """Findings of this node, and of every other node that finished."""

    node: Node
    findings: tuple[Finding, ...]
    others: dict[int, tuple[Finding, ...]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    @property
    def status(self) -> Status:
        # A node without a result has failed.
        found = [*self.findings, *(finding for findings in self.others.values() for finding in findings)]
        return Status.FAIL if self.silent else worst(found)

    def as_json(self) -> dict[str, object]:
        """Return the results for scripts; docs/nfs.md describes the format."""
        return {
            "path": str(self.node.path),
            "status": self.status,
            "nodes": self.node.nodes,
            "node_rank": self.node.rank,
            "checks": [finding.as_json() for finding in self.findings],
            "others": [
                {"node_rank": rank, "status": worst(found), "checks": [finding.as_json() for finding in found]}
                for rank, found in sorted(self.others.items())
            ],
            "silent": self.silent,
        }


def check(node: Node, stop: StopRequest, say: Callable[[str], None]) -> CheckOutcome:
    """Check a folder together with the other nodes, and leave nothing behind.

    `say` prints missing nodes, and that the filesystem does not answer. Raises Stopped after a signal.
    """
    # The list of mounts has real paths only.
    node = replace(node, path=Path(os.path.realpath(node.path.expanduser())))
    peers = Rendezvous(node, stop, say)
    with cleanup_after_kill(peers.workspace, node.rank, peers.info.nonce), watchdog(peers, say):
        try:
            findings: dict[str, Finding] = {}
            for name, make in IN_ORDER.items():
                if name in INDEPENDENT or findings["see"].status is not Status.FAIL:
                    findings[name] = attempt(name, make, peers)
            skip = "not checked: the nodes did not meet"
            ordered = tuple(findings.get(name) or skipped(name, skip) for name in CHECKS)
            others = share(ordered, peers) if findings["see"].status is not Status.FAIL else {}
        finally:
            peers.leave()
    return CheckOutcome(node, ordered, others, tuple(rank for rank in node.others if rank not in others))


def attempt(name: str, make: Check, peers: Rendezvous) -> Finding:
    """Make one check; an error of the filesystem, or a node that is gone, becomes its finding."""
    peers.stage, is_meeting = name, name == "see"
    try:
        return make(peers)
    except OSError as error:
        sentence, fix = explain_errno(error, peers.node.path)
        finding = failed(name, f"cannot meet: {sentence}" if is_meeting else sentence, fix)
    except RendezvousError as error:
        if is_meeting:
            finding = failed(name, str(error), *peers.node.commands(error.ranks), *listed_late(peers.node))
        else:
            finding = failed(name, f"not finished: {error}", "see the report of that node")
    peers.post_failure()
    return finding


def listed_late(node: Node) -> list[str]:
    """Return advice on the mount of a filesystem that shows new files late to nodes; empty for others."""
    fstype = mounts.fstype_of(node)
    is_late = fstype in SHORTER_CACHES and fstype not in mounts.NFS  # a heartbeat makes NFS ask its server
    return [f"where they were started, this mount shows their files late: {SHORTER_CACHES[fstype]}"] if is_late else []


def share(findings: Iterable[Finding], peers: Rendezvous) -> dict[int, tuple[Finding, ...]]:
    """Publish this node's findings, and return the findings of all others that finished."""
    peers.stage, others = "outcome", dict[int, tuple[Finding, ...]]()
    with suppress(OSError):  # a folder that fails even now has been found wrong by the checks
        peers.post("findings", [finding.as_json() for finding in findings])
        for rank, found in peers.available("findings"):
            others[rank] = tuple(map(parse_finding, found))
        peers.drain()
    return others


@contextmanager
def watchdog(peers: Rendezvous, say: Callable[[str], None]) -> Iterator[None]:
    """Report a filesystem that does not answer, and exit at the timeout as after a failed check.

    If a file server is down, system calls block, and the thread in one cannot handle a signal.
    """
    closed = threading.Event()
    path = peers.node.path
    timeout = peers.node.timeout_seconds

    def watch() -> None:
        reported = False
        while not closed.wait(0.5):
            silence = time.monotonic() - peers.last_progress
            where = f"{path} has not answered for {silence:.0f} s (in `{peers.stage}`)"
            if silence > timeout:
                say(f"error: {where}: given up")
                say(f"hint: is its file server up? findmnt -T {path}")
                os._exit(int(ExitCode.ENVIRONMENT))
            if silence > UNRESPONSIVE_SECONDS and not reported:
                reported = True
                say(f"{where}; waiting up to {timeout:g} s")

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
