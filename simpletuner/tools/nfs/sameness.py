"""What must be the same on all nodes: the user, the owner that others see on its files, and the time."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from simpletuner.tools.nfs.findings import Finding, duration, failed, passed, ranks_in_words, warned
from simpletuner.tools.nfs.meeting import Meeting
from simpletuner.tools.nfs.node import Node
from simpletuner.tools.nfs.seeing import Answer

CLOCK_WARN_SECONDS, CLOCK_FAIL_SECONDS = 1.0, 60.0
CLOCK_FIX = "on every node: sudo timedatectl set-ntp true; timedatectl timesync-status"


def clock(node: Node, meeting: Meeting, rounds: Sequence[Sequence[Answer]]) -> Finding:
    """Return how far clocks differ: from each other node's, or alone from the file server's."""
    if node.is_alone:
        offset, uncertainty, who = file_server_clock(node, meeting)
    else:
        best = [min(answers, key=lambda one: one.uncertainty_seconds) for answers in by_rank(rounds).values()]
        farthest = max(best, key=lambda one: abs(one.offset_seconds))
        offset, uncertainty, who = farthest.offset_seconds, farthest.uncertainty_seconds, f"node {farthest.rank}"
    direction = "ahead of" if offset > 0 else "behind"
    limits = f"warning from {CLOCK_WARN_SECONDS:g} s, failure from {CLOCK_FAIL_SECONDS:g} s"
    sentence = (
        f"{who} is {duration(abs(offset))} {direction} this node, give or take {duration(uncertainty)} ({limits})"
    )
    values = {"offset_seconds": offset, "uncertainty_seconds": uncertainty, "compared_with": who}
    if abs(offset) - uncertainty >= CLOCK_FAIL_SECONDS:
        return failed("clock", sentence, CLOCK_FIX, **values)
    if abs(offset) + uncertainty >= CLOCK_WARN_SECONDS:
        return warned("clock", sentence, CLOCK_FIX, **values)
    return passed("clock", sentence, **values)


def by_rank(rounds: Iterable[Iterable[Answer]]) -> dict[int, list[Answer]]:
    """Return every node's answers."""
    found: dict[int, list[Answer]] = {}
    for answers in rounds:
        for answer in answers:
            found.setdefault(answer.rank, []).append(answer)
    return found


def file_server_clock(node: Node, meeting: Meeting) -> tuple[float, float, str]:
    """Return how far the clock that stamps new files is ahead, and how exactly that is known."""
    before = node.clock()
    stamped = meeting.stamp().st_mtime
    after = node.clock()
    return stamped - (before + after) / 2, (after - before) / 2 + 0.01, "the clock that stamps files"


def identity(node: Node, meeting: Meeting, rounds: Sequence[Sequence[Answer]]) -> Finding:
    """Return whether all nodes are one user, and its files are seen as its own."""
    mine = {"uid": os.geteuid(), "gid": os.getegid(), "user": user_name()}
    everyone = meeting.gather("who", mine)
    numbers = {"uid": mine["uid"], "gid": mine["gid"]}
    for name, verdict in (("uid", failed), ("gid", warned)):
        if len({who[name] for who in everyone.values()}) > 1:
            return verdict("identity", difference(name, everyone), *same_user(everyone, mine, node), **numbers)
    owners = owners_seen(node, meeting, rounds)
    foreign = {rank: owner for rank, owner in owners.items() if owner != mine["uid"]}
    if foreign:
        return foreign_owner(mine, foreign, numbers)
    where = "all nodes run as" if node.nodes > 1 else "files belong to"
    return passed("identity", f"{where} {mine['user']}, uid {mine['uid']}, gid {mine['gid']}", **numbers)


def owners_seen(node: Node, meeting: Meeting, rounds: Sequence[Sequence[Answer]]) -> dict[int, int]:
    """Return the uid that each other node sees on this node's file; alone, what this one sees."""
    if node.is_alone:
        return {node.rank: meeting.stamp().st_uid}
    return {answer.rank: answer.uid for answer in rounds[0]}


def difference(name: str, everyone: Mapping[int, Mapping[str, Any]]) -> str:
    """Return who runs as whom."""
    listed = ", ".join(f"node {rank}: {who['user']} {who[name]}" for rank, who in sorted(everyone.items()))
    return f"the {name} differs ({listed}): nodes could not change or remove each other's files"


def same_user(everyone: Mapping[int, Mapping[str, Any]], mine: Mapping[str, Any], node: Node) -> tuple[str, ...]:
    """Return how a node gets the user of node 0."""
    first = everyone[0]
    if node.rank == 0 or mine["user"] == "root":
        return (f"start every node as the same user: uid {first['uid']}, gid {first['gid']}",)
    return (f"sudo groupmod -g {first['gid']} {mine['user']}; sudo usermod -u {first['uid']} {mine['user']}",)


def foreign_owner(mine: Mapping[str, Any], foreign: Mapping[int, int], numbers: Mapping[str, Any]) -> Finding:
    """Return that files of this node are seen as somebody else's."""
    seen = f"{ranks_in_words(foreign)} found uid {min(foreign.values())}, not {mine['uid']}, on this node's files"
    if mine["uid"] == 0:
        fix = "run as an ordinary user, or export with `no_root_squash` in /etc/exports; then sudo exportfs -ra"
        return warned("identity", f"root is squashed: {seen}", fix, **numbers)
    fix = "set the same `Domain =` in /etc/idmapd.conf on server and nodes; then sudo nfsidmap -c"
    return failed("identity", seen, fix, **numbers)


def user_name() -> str:
    """Return the name of this process's user, or its number where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"
