"""Ping and pong through files: whether nodes see each other's files, how late, whose they are, and what clocks say.

A node writes a ping; every other answers in a file beside it. What one clock measured stays on that clock: the round
trip on the writer's, the pause before the answer on the other's; their difference bounds the clocks' offset (as in
RFC 5905, section 8). Files lie in a folder that the heartbeat does not touch, so a client's caches show.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.tools.nfs.findings import Finding, duration, passed, plural, skipped, warned
from simpletuner.tools.nfs.meeting import Meeting, Unmet
from simpletuner.tools.nfs.node import Node
from simpletuner.tools.nfs.place import look_anew, read_json, write_whole

LATE_SECONDS = 5.0
"""Waits of an ordinary look; after it the client is made to look anew, and the finding is a warning."""
ROUNDS = 2
SLOW_CACHE_FIX = "mount with shorter caches: add `lookupcache=positive,acdirmax=5` to the options in /etc/fstab"


@dataclass(frozen=True)
class Answer:
    """What one pong told: `offset_seconds` is how far the other's clock is ahead, within `uncertainty_seconds`."""

    rank: int
    round_trip_seconds: float
    offset_seconds: float
    uncertainty_seconds: float
    uid: int
    gid: int


def exchange(node: Node, meeting: Meeting) -> list[list[Answer]]:
    """Return the answers of all others, round by round."""
    folder = own_folder(meeting, node.rank)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)  # others write their pongs into it, whoever they are
    return [one_round(node, meeting, number) for number in range(ROUNDS)]


def own_folder(meeting: Meeting, rank: int) -> Path:
    """Return the folder with a node's ping and the pongs to it."""
    return meeting.place.own(rank, "seen")


def one_round(node: Node, meeting: Meeting, number: int) -> list[Answer]:
    """Write a ping, answer those of all others, and return their answers to it.

    The first round looks as any program does; later ones ask the server, so that clocks are not measured by caches.
    """
    meeting.gather(f"start-{number}")
    folder, began, sent = own_folder(meeting, node.rank), time.monotonic(), node.clock()
    write_whole(folder / f"ping-{number}", {"sent": sent})
    unanswered, unheard, answers = set(node.others), set(node.others), []
    while unanswered or unheard:
        for other in sorted(unanswered):
            if answered(node, own_folder(meeting, other), number):
                unanswered.remove(other)
        for other in sorted(unheard):
            path = folder / f"pong-{number}-{other}"
            if is_seen(path, number) and (pong := read_json(path)) is not None:
                answers.append(answer(other, sent, node.clock(), pong))
                unheard.remove(other)
        waited = time.monotonic() - began
        if waited > node.timeout_seconds:
            raise Unmet(f"no sight of a file within {node.timeout_seconds:g} s", unanswered | unheard)
        if waited > (0.1 if number else LATE_SECONDS):
            for late in (folder, *(own_folder(meeting, other) for other in unanswered)):
                look_anew(late)
        meeting.pause(0.002 if waited < 1 else 0.05)
    return answers


def is_seen(path: Path, number: int) -> bool:
    """Return whether to open a file: at once in the first round, later only what the folder lists.

    A client remembers that a name was missing when it was asked for.
    """
    return number == 0 or path in path.parent.iterdir()


def answered(node: Node, folder: Path, number: int) -> bool:
    """Answer a node's ping if it can be seen, with the owner that this node sees."""
    ping = folder / f"ping-{number}"
    if not is_seen(ping, number) or read_json(ping) is None:
        return False
    received, owner = node.clock(), ping.stat()
    pong = {"received": received, "uid": owner.st_uid, "gid": owner.st_gid, "replied": node.clock()}
    write_whole(folder / f"pong-{number}-{node.rank}", pong)
    return True


def answer(other: int, sent: float, returned: float, pong: dict[str, Any]) -> Answer:
    """Return what four times on two clocks tell."""
    offset = ((pong["received"] - sent) + (pong["replied"] - returned)) / 2
    uncertainty = ((returned - sent) - (pong["replied"] - pong["received"])) / 2
    return Answer(other, returned - sent, offset, max(uncertainty, 0.0), pong["uid"], pong["gid"])


def sight(node: Node, rounds: Sequence[Sequence[Answer]]) -> Finding:
    """Return how soon files are seen, from the first round."""
    if node.is_alone:
        return skipped("see", "one node: nobody else has to see its files")
    slowest = max(rounds[0], key=lambda answer: answer.round_trip_seconds)
    seconds = slowest.round_trip_seconds
    sentence = (
        f"{plural(len(node.others), 'other node')} saw this node's file and answered; "
        f"the slowest round trip took {duration(seconds)} (node {slowest.rank})"
    )
    if seconds > LATE_SECONDS:
        return warned("see", f"{sentence}: above {LATE_SECONDS:g} s", SLOW_CACHE_FIX, round_trip_seconds=seconds)
    return passed("see", sentence, round_trip_seconds=seconds)
