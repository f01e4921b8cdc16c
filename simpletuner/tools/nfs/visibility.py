"""Checks `see`, `identity` and `clock`: seeing each other's files, how soon, with which owner and time?

A node writes a ping; every other one answers with a file next to it. Times from two clocks are never
subtracted: the round trip is measured on the writer's clock, the pause before the answer on the other's.
Their difference bounds the offset of the clocks (RFC 5905, section 8). Pings are in a folder without
heartbeats, so that a client's caches show.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from simpletuner.system.files.late_files import SHORTER_CACHES
from simpletuner.system.numbers import count_noun
from simpletuner.tools.nfs.mounts import fstype_of, mount_of_node, scope_of
from simpletuner.tools.nfs.rendezvous import Node, Rendezvous, RendezvousError
from simpletuner.tools.nfs.results import (
    Finding,
    failed,
    format_duration,
    format_ranks,
    passed,
    skipped,
    warned,
)
from simpletuner.tools.nfs.workspace import GONE, invalidate_dir_cache, read_bytes, write_atomically

# Time for which the client's caches are relied on; then they are invalidated, with a warning.
LATE_SECONDS = 5.0
ROUNDS = 2
# Longest wait for a change in a folder that was listed before: sshfs keeps a listing for 20 s.
LISTED_SECONDS = 30.0
CLOCK_WARN_SECONDS, CLOCK_FAIL_SECONDS = 1.0, 60.0
CLOCK_FIX = "on every node: sudo timedatectl set-ntp true; timedatectl timesync-status"


@dataclass(frozen=True)
class Pong:
    """Facts from one answer: the other clock is `offset_seconds` ahead, within `uncertainty_seconds`."""

    rank: int
    round_trip_seconds: float
    offset_seconds: float
    uncertainty_seconds: float
    uid: int
    """The owner that the other node sees on this node's file."""


def check_see(peers: Rendezvous) -> Finding:
    """Check `see`: find the others, tell them about this node's mount, and exchange pings."""
    peers.register()
    peers.join()
    reaches = peers.gather("reach", scope_of(mount_of_node(peers.node)))
    folder = ping_folder(peers, peers.node.rank)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)  # others, perhaps as other users, write their pongs into it
    peers.rounds = [exchange_pings(peers, number) for number in range(ROUNDS)]
    listings = measure_listings(peers)
    peers.gather("end")
    peers.reaches = reaches
    return visibility_result(peers.node, peers.rounds, listings)


@dataclass(frozen=True)
class ListingDelay:
    """Seconds until a listing had another node's new file, and not its removed one; None: never."""

    rank: int
    added_seconds: float | None
    removed_seconds: float | None


def measure_listings(peers: Rendezvous) -> list[ListingDelay]:
    """List every other node's folder, which that node then changes, and again until the change shows."""
    folders = {rank: peers.workspace.file(rank, "listed") for rank in range(peers.node.nodes)}
    own = folders.pop(peers.node.rank)
    own.mkdir(exist_ok=True)
    write_atomically(own / "old", "")
    peers.gather("list")
    for folder in folders.values():
        names_in(folder)
    peers.gather("listed")
    write_atomically(own / "new", "")
    (own / "old").unlink()
    peers.gather("changed")
    added, removed = dict[int, float](), dict[int, float]()
    for waited in peers.polls(listed_limit(peers.node)):
        for rank, folder in folders.items():
            names = names_in(folder)
            if "new" in names:
                added.setdefault(rank, waited)
            if "old" not in names:
                removed.setdefault(rank, waited)
        if len(added) == len(removed) == len(folders):
            break
    return [ListingDelay(rank, added.get(rank), removed.get(rank)) for rank in folders]


def listed_limit(node: Node) -> float:
    return min(LISTED_SECONDS, node.timeout_seconds / 2)  # the others wait meanwhile


def names_in(folder: Path) -> set[str]:
    """List a folder; of one that is not visible yet return nothing."""
    try:
        return {path.name for path in folder.iterdir()}
    except OSError as error:
        if error.errno in GONE:
            return set()
        raise


def ping_folder(peers: Rendezvous, rank: int) -> Path:
    """Return the folder with a node's pings and the pongs to them."""
    return peers.workspace.file(rank, "seen")


def exchange_pings(peers: Rendezvous, number: int) -> list[Pong]:
    """Write a ping, answer every other node's, and return their answers.

    Round 0 looks for files as any program does; later ones ask the server, so caches add no time.
    """
    peers.gather(f"start-{number}")
    node, folder, pongs = peers.node, ping_folder(peers, peers.node.rank), []
    sent = node.clock()
    write_atomically(folder / f"ping-{number}", json.dumps({"sent": sent}))
    unanswered, waiting = set(node.others), set(node.others)
    for waited in peers.polls():
        unanswered -= {other for other in unanswered if answer(node, ping_folder(peers, other), number)}
        for other in sorted(waiting):
            if pong := read_visible(folder / f"pong-{number}-{other}", number):
                pongs.append(measure(other, sent, node.clock(), pong))
                waiting.remove(other)
        if not unanswered | waiting:
            return pongs
        if waited > (0.1 if number else LATE_SECONDS):
            for late in (folder, *(ping_folder(peers, other) for other in unanswered)):
                invalidate_dir_cache(late)
    raise RendezvousError(f"no sight of a file within {node.timeout_seconds:g} s", unanswered | waiting)


def read_visible(path: Path, number: int) -> Any:
    """Read a JSON file; None while it is not visible or not complete.

    A client remembers that a name did not exist when it was asked for. So only round 0 asks for names that
    the folder does not list.
    """
    with contextlib.suppress(ValueError):
        if number == 0 or path in path.parent.iterdir():
            return json.loads(read_bytes(path) or b"")
    return None


def answer(node: Node, folder: Path, number: int) -> bool:
    """Answer a node's ping, with the owner that this node sees; return whether it was visible."""
    ping = folder / f"ping-{number}"
    if not read_visible(ping, number):
        return False
    received, owner = node.clock(), ping.stat().st_uid
    pong = {"received": received, "uid": owner, "replied": node.clock()}
    write_atomically(folder / f"pong-{number}-{node.rank}", json.dumps(pong))
    return True


def measure(other: int, sent: float, returned: float, pong: Mapping[str, Any]) -> Pong:
    """Compute the offset of two clocks from four times."""
    offset = ((pong["received"] - sent) + (pong["replied"] - returned)) / 2
    uncertainty = ((returned - sent) - (pong["replied"] - pong["received"])) / 2
    return Pong(other, returned - sent, offset, max(uncertainty, 0.0), pong["uid"])


def visibility_result(node: Node, rounds: Sequence[Sequence[Pong]], listings: Sequence[ListingDelay] = ()) -> Finding:
    """Judge how soon files are visible by name, in the first round, and in folders listed before."""
    if node.is_alone:
        return skipped("see", "one node: nobody else has to see its files")
    slowest = max(rounds[0], key=lambda pong: pong.round_trip_seconds)
    seconds = slowest.round_trip_seconds
    sentence = (
        f"{count_noun(len(node.others), 'other node')} saw this node's file and answered; "
        f"the slowest round trip took {format_duration(seconds)} (node {slowest.rank})"
    )
    added, removed = (slowest_of(times) for times in zip(*map(times_of, listings), strict=True)) if listings else (0, 0)
    values = {"round_trip_seconds": seconds, "listed_seconds": added, "removed_seconds": removed}
    fix = SHORTER_CACHES.get(fstype_of(node), f"mount with shorter caches; for NFS: {SHORTER_CACHES['nfs']}")
    if seconds > LATE_SECONDS:
        return warned("see", f"{sentence}: above {LATE_SECONDS:g} s", fix, **values)
    late = [
        f"{what} {f'more than {listed_limit(node):.0f}' if time is None else f'{time:.1f}'} s"
        for what, time in (("a new file was not listed for", added), ("a removed one was still listed for", removed))
        if time is None or time > LATE_SECONDS
    ]
    if late:
        return warned("see", f"{sentence}; in a folder that was listed before, {' and '.join(late)}", fix, **values)
    return passed("see", sentence, **values)


def times_of(listing: ListingDelay) -> tuple[float | None, float | None]:
    return listing.added_seconds, listing.removed_seconds


def slowest_of(times: Sequence[float | None]) -> float | None:
    """Return the longest time; None where one has no end."""
    ended = [time for time in times if time is not None]
    return max(ended) if len(ended) == len(times) else None


def check_clock(peers: Rendezvous) -> Finding:
    """Check `clock`: how far clocks differ; a single node compares with the file server."""
    if peers.node.is_alone:
        before, stamped, after = peers.node.clock(), stat_new_file(peers).st_mtime, peers.node.clock()
        # 0.01: Linux stamps files with the time of its last tick, which may be 10 ms old (HZ=100).
        offset, uncertainty = stamped - (before + after) / 2, (after - before) / 2 + 0.01
        who = "the clock that stamps files"
    else:
        pongs = sorted(chain(*peers.rounds), key=lambda pong: -pong.uncertainty_seconds)
        most_exact = {pong.rank: pong for pong in pongs}.values()
        farthest = max(most_exact, key=lambda pong: abs(pong.offset_seconds))
        offset, uncertainty, who = farthest.offset_seconds, farthest.uncertainty_seconds, f"node {farthest.rank}"
    direction = "ahead of" if offset > 0 else "behind"
    limits = f"warning from {CLOCK_WARN_SECONDS:g} s, failure from {CLOCK_FAIL_SECONDS:g} s"
    difference = f"{format_duration(abs(offset))} {direction} this node"
    sentence = f"{who} is {difference}, give or take {format_duration(uncertainty)} ({limits})"
    values = {"offset_seconds": offset, "uncertainty_seconds": uncertainty, "compared_with": who}
    if abs(offset) - uncertainty >= CLOCK_FAIL_SECONDS:
        return failed("clock", sentence, CLOCK_FIX, **values)
    if abs(offset) + uncertainty >= CLOCK_WARN_SECONDS:
        return warned("clock", sentence, CLOCK_FIX, **values)
    return passed("clock", sentence, **values)


def stat_new_file(peers: Rendezvous) -> os.stat_result:
    """Return owner and times that the filesystem gives to a file that this node has just written."""
    path = peers.workspace.file(peers.node.rank, f"{peers.stage}-stamp")
    write_atomically(path, "")
    return path.stat()


def check_identity(peers: Rendezvous) -> Finding:
    """Check `identity`: all nodes run as one user, and files belong to who wrote them."""
    node, mine = peers.node, {"uid": os.geteuid(), "gid": os.getegid(), "user": user_name()}
    everyone = peers.gather("who", mine)
    numbers = {"uid": mine["uid"], "gid": mine["gid"]}
    for name, verdict in (("uid", failed), ("gid", warned)):
        if len({who[name] for who in everyone.values()}) > 1:
            listed = ", ".join(f"node {rank}: {who['user']} {who[name]}" for rank, who in sorted(everyone.items()))
            sentence = f"the {name} differs ({listed}): nodes could not change or remove each other's files"
            return verdict("identity", sentence, fix_user(everyone, mine, node), **numbers)
    seen = {pong.rank: pong.uid for pong in peers.rounds[0]}
    owners = seen or {node.rank: stat_new_file(peers).st_uid}  # a single node only sees its own files
    foreign = {rank: owner for rank, owner in owners.items() if owner != mine["uid"]}
    if foreign:
        return report_foreign_owner(mine, foreign, numbers)
    where = "all nodes run as" if node.nodes > 1 else "files belong to"
    return passed("identity", f"{where} {mine['user']}, uid {mine['uid']}, gid {mine['gid']}", **numbers)


def fix_user(everyone: Mapping[int, Mapping[str, object]], mine: Mapping[str, object], node: Node) -> str:
    first = everyone[0]
    if node.rank == 0 or mine["user"] == "root":
        return f"start every node as the same user: uid {first['uid']}, gid {first['gid']}"
    return f"sudo groupmod -g {first['gid']} {mine['user']}; sudo usermod -u {first['uid']} {mine['user']}"


def report_foreign_owner(
    mine: Mapping[str, object], foreign: Mapping[int, int], numbers: Mapping[str, object]
) -> Finding:
    seen = f"{format_ranks(foreign)} found uid {min(foreign.values())}, not {mine['uid']}, on this node's files"
    if mine["uid"] == 0:
        fix = "run as an ordinary user, or export with `no_root_squash` in /etc/exports; then sudo exportfs -ra"
        return warned("identity", f"root is squashed: {seen}", fix, **numbers)
    fix = "set the same `Domain =` in /etc/idmapd.conf on server and nodes; then sudo nfsidmap -c"
    return failed("identity", seen, fix, **numbers)


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"
