"""All checks in order on one node, and the result that all nodes have in common."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner.system.signals import StopRequest
from simpletuner.tools.nfs import behaviour, locking, port, room, sameness, seeing, sharing
from simpletuner.tools.nfs.faults import explained
from simpletuner.tools.nfs.findings import CHECKS, Finding, Status, failed, finding_from, ranks_in_words, skipped, worst
from simpletuner.tools.nfs.janitor import Janitor
from simpletuner.tools.nfs.meeting import Meeting, Unmet
from simpletuner.tools.nfs.mounts import Mount
from simpletuner.tools.nfs.node import Node
from simpletuner.tools.nfs.patience import watched
from simpletuner.tools.nfs.place import Place
from simpletuner.tools.nfs.seeing import Answer


@dataclass(frozen=True)
class Outcome:
    """What this node found, and what every other that came to the end found."""

    node: Node
    findings: tuple[Finding, ...]
    others: dict[int, tuple[Finding, ...]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    @property
    def status(self) -> Status:
        """Return the worst status of all nodes; one that told no outcome has failed."""
        found = [*self.findings, *(finding for findings in self.others.values() for finding in findings)]
        return Status.FAIL if self.silent else worst(found)

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts; see docs/nfs.md."""
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


def check(node: Node, stop: StopRequest, say: Callable[[str], None]) -> Outcome:
    """Check a folder together with the other nodes, and leave nothing behind.

    `say` is told whom it waits for, and if the filesystem does not answer. Raises Stopped when a signal came.
    """
    node = replace(node, path=Path(os.path.realpath(node.path.expanduser())))
    place = Place(node.path)
    meeting = Meeting(place, node.rank, node.nodes, node.timeout_seconds, stop)
    with Janitor(place, node.rank, meeting.token), watched(meeting, say):  # forks: before any thread is started
        round_ = Round(node, place, meeting, say)
        try:
            return round_.go()
        finally:
            meeting.leave()


class Round:
    """One pass through the checks on one node, with what they have found so far."""

    def __init__(self, node: Node, place: Place, meeting: Meeting, say: Callable[[str], None]) -> None:
        self.node, self.place, self.meeting, self.say = node, place, meeting, say
        self.findings: dict[str, Finding] = {}
        self.answers: list[list[Answer]] = []
        self.reaches: dict[int, str] = {}

    def go(self) -> Outcome:
        """Make every check that can be made, and share the results."""
        self.findings["write"] = behaviour.write(self.node, self.place)
        mount = sharing.mounted(self.node)
        together = self.meet(mount)
        if together:
            self.make_checks()
        self.findings["mount"] = sharing.judged(self.node, mount, self.reaches)
        self.attempt("space", lambda: room.space(self.node))
        return self.shared() if together else self.outcome({}, self.node.others)

    def meet(self, mount: Mount | None) -> bool:
        """Meet the others and see whether files are seen; return whether the other checks have sense."""
        self.meeting.stage = "see"
        try:
            self.meeting.claim()
            self.meeting.join(self.waiting)
            reaches = self.meeting.gather("reach", str(sharing.reach_of(mount)))
            self.answers = seeing.exchange(self.node, self.meeting)
            self.meeting.gather("end")
        except OSError as error:
            sentence, fix = explained(error, self.node.path)
            self.findings["see"] = failed("see", f"cannot meet: {sentence}", fix)
        except Unmet as unmet:
            self.findings["see"] = failed("see", str(unmet), *self.commands(unmet.ranks))
        else:
            self.reaches = {rank: reaches[rank] for rank in self.node.others}
            self.findings["see"] = seeing.sight(self.node, self.answers)
            return True
        self.meeting.abandon()
        return False

    def waiting(self, missing: list[int]) -> None:
        """Say who is late, and what is to be started there."""
        self.say(f"waiting up to {self.node.timeout_seconds:g} s for {ranks_in_words(missing)}:")
        for command in self.commands(missing):
            self.say(f"  {command}")

    def commands(self, ranks: Iterable[int]) -> list[str]:
        """Return what to type so that missing nodes come."""
        missing = [f"on node {rank}: {self.node.command_of(rank)}" for rank in ranks if rank != self.node.rank]
        return missing or ["give every node its own --node-rank, from 0 to nodes - 1, and the same --nodes"]

    def make_checks(self) -> None:
        """Make the checks for which nodes work together, one after the other."""
        node, meeting = self.node, self.meeting
        self.attempt("rename", lambda: behaviour.rename(node, meeting))
        self.attempt("exclusive", lambda: behaviour.exclusive(node, meeting))
        self.attempt("lock", lambda: locking.lock(node, meeting))
        self.attempt("delete", lambda: behaviour.delete(node, meeting))
        self.attempt("identity", lambda: sameness.identity(node, meeting, self.answers))
        self.attempt("clock", lambda: sameness.clock(node, meeting, self.answers))
        self.attempt("speed", lambda: room.speed(node, meeting))
        self.attempt("port", lambda: port.port(node, meeting))

    def attempt(self, name: str, made: Callable[[], Finding]) -> None:
        """Make one check; what the filesystem refuses, or a node that is gone, is its finding."""
        self.meeting.stage = name
        try:
            self.findings[name] = made()
            return
        except OSError as error:
            sentence, fix = explained(error, self.node.path)
            self.findings[name] = failed(name, sentence, fix)
        except Unmet as unmet:
            self.findings[name] = failed(name, f"not finished: {unmet}", "see the report of that node")
        self.meeting.abandon()

    def shared(self) -> Outcome:
        """Post this node's findings, and return them with those of all others."""
        self.meeting.stage = "outcome"
        told: dict[int, list[dict[str, Any]]] = {}
        with contextlib.suppress(OSError):  # a folder that fails even now has been found wrong by the checks
            self.meeting.post("findings", [finding.as_json() for finding in self.ordered()])
            for other in self.node.others:
                with contextlib.suppress(Unmet):  # it is named as silent
                    told |= self.meeting.wait("findings", [other])
            self.meeting.see_off()
        return self.outcome({rank: tuple(map(finding_from, found)) for rank, found in told.items()}, self.node.others)

    def outcome(self, others: dict[int, tuple[Finding, ...]], expected: Iterable[int]) -> Outcome:
        """Return what is known at the end."""
        return Outcome(self.node, self.ordered(), others, tuple(rank for rank in expected if rank not in others))

    def ordered(self) -> tuple[Finding, ...]:
        """Return one finding for each check, in the order of the table."""
        why = "not checked: the nodes did not meet"
        return tuple(self.findings.get(name) or skipped(name, why) for name in CHECKS)
