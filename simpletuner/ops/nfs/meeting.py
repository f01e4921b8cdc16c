"""How nodes meet in a shared folder: each has a card, posts what it has to say, and waits for what others post.

A card names its process by a token, and the tokens of those whose cards it has read. Two nodes have met when each
finds its own token on the other's card: what a dead session left behind can never name a fresh token. Cards are
written anew twice a second. That shows that a node lives, and it keeps waits short on NFS: a client that changes a
folder learns at once that others changed it too, where it may otherwise believe its cache for a minute.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from simpletuner.ops.nfs.findings import ranks_in_words
from simpletuner.ops.nfs.place import CARD, Place
from simpletuner.ops.signals import StopRequest

BEAT_SECONDS = 0.5
STALE_SECONDS = 3.0
"""A card that is not written anew for so long belongs to nobody."""
CLAIM_ATTEMPTS = 20
GONE = (errno.ENOENT, errno.ESTALE)


class Unmet(Exception):
    """What was waited for will not come; `ranks` are the nodes that it would have come from."""

    def __init__(self, sentence: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(sentence)
        self.ranks = sorted(ranks)


class Meeting:
    """One node's side of the meeting."""

    def __init__(self, place: Place, rank: int, nodes: int, timeout_seconds: float, stop: StopRequest) -> None:
        self.place, self.rank, self.nodes = place, rank, nodes
        self.timeout_seconds, self.stop = timeout_seconds, stop
        self.token = uuid.uuid4().hex
        self.others = [other for other in range(nodes) if other != rank]
        self.stage = "write"
        self.last_sign = time.monotonic()
        self.holds_rank = False
        self._met: dict[int, str] = {}
        self._came: set[int] = set()
        self._lost: set[int] = set()
        self._beats = 0
        self._writing, self._ending = threading.Lock(), threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def claim(self) -> None:
        """Take this node's rank. Raises Unmet when a living process has it, OSError where nothing can be written."""
        taken_over = False
        for attempts_left in reversed(range(CLAIM_ATTEMPTS)):
            try:
                self.place.make()
                os.close(os.open(self._card(self.rank), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileNotFoundError:
                if attempts_left:
                    continue  # the last node of an earlier check has just removed the folder
                raise
            except FileExistsError:
                self._refuse_living()
                taken_over = True
            break
        self.place.clear(self.rank, card=False)
        self.holds_rank = True
        self._write_card()
        self._heart.start()
        if taken_over:
            self.pause(BEAT_SECONDS)  # of two that take over at once, the later one's card stays
            self.check_rank()

    def join(self, waiting: Callable[[list[int]], None]) -> None:
        """Meet all others. Calls `waiting` once with those that are late; raises Unmet when some do not come."""
        began, told = time.monotonic(), False
        while missing := [other for other in self.others if not self._has_met(other)]:
            self.check_rank()
            seconds = time.monotonic() - began
            if seconds > self.timeout_seconds:
                late = set(missing) - self._came or missing  # one that came may have lost patience before us
                raise Unmet(f"{ranks_in_words(late)} did not come within {self.timeout_seconds:g} s", late)
            if seconds > 1 and not told:
                waiting(missing)
                told = True
            self.pause(0.02)

    def post(self, name: str, value: Any = None) -> None:
        """Let the others read a value under a name of the present stage."""
        write_whole(self.place.own(self.rank, f"{self.stage}.{name}.json"), {"token": self.token, "value": value})

    def posted(self, other: int, name: str) -> Any:
        """Return what a node posted in the present stage, boxed in a list, or None."""
        found = read_json(self.place.own(other, f"{self.stage}.{name}.json"))
        expected = self.token if other == self.rank else self._met.get(other)
        return [found["value"]] if found and found["token"] == expected else None

    def wait(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what all others posted under a name. Raises Unmet when one failed, left, or is silent too long."""
        pending, values = set(self.others if ranks is None else ranks), {}
        deadline = time.monotonic() + self.timeout_seconds
        pause_seconds = 0.002
        while True:
            for other in sorted(pending):
                if (box := self.posted(other, name)) is not None:
                    values[other] = box[0]
            pending -= set(values)
            if not pending:
                return values
            self._check_others(pending, name, deadline)
            self.pause(pause_seconds)
            pause_seconds = min(0.05, pause_seconds * 1.2)

    def gather(self, name: str, value: Any = None) -> dict[int, Any]:
        """Post a value and return those of all nodes, this one's included."""
        self.post(name, value)
        return {self.rank: value, **self.wait(name)}

    def abandon(self) -> None:
        """Tell the others not to wait for this node in the present stage."""
        with contextlib.suppress(OSError):
            self.post("failed")

    def check_rank(self) -> None:
        """Raise Unmet when another process has taken this node's rank."""
        card = self.card(self.rank)
        if card and card["token"] != self.token:
            self.holds_rank = False
            raise Unmet(self._taken_by(card), [self.rank])

    def card(self, rank: int) -> dict[str, Any] | None:
        """Return a node's card, or None while there is none."""
        return read_json(self._card(rank))

    def token_of(self, other: int) -> str:
        """Return the token of a node that was met."""
        return self._met[other]

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Stopped when a signal came."""
        self.last_sign = time.monotonic()
        if self.stop.signal_number:
            raise self.stop.stopped("during nfs check")
        time.sleep(seconds)

    def see_off(self) -> None:
        """Wait until every other node has read everything, or has left."""
        self.stage = "end"
        self.post("read")
        for other in self.others:
            with contextlib.suppress(Unmet):
                self.wait("read", [other])
        self._let_strangers_go()

    def leave(self) -> None:
        """Stop the heartbeat, and remove all that this node wrote."""
        self._ending.set()
        if self._heart.is_alive():
            self._heart.join()
        if self.holds_rank:
            self.place.leave(self.rank)
        else:
            self.place.remove_when_empty()

    def _check_others(self, pending: set[int], name: str, deadline: float) -> None:
        """Raise Unmet when waiting has no sense any more."""
        for other in sorted(pending):
            if self.posted(other, "failed") is not None:
                raise Unmet(f"node {other} could not go on", [other])
            card = self.card(other)
            is_gone = other in self._lost or card is None or card["token"] != self._met[other]
            if is_gone and self.posted(other, name) is None:
                raise Unmet(f"node {other} ended before it was through", [other])
        if time.monotonic() > deadline:
            self._lost |= pending  # nobody waits for them again
            raise Unmet(f"{ranks_in_words(pending)} said nothing for {self.timeout_seconds:g} s", pending)

    def _let_strangers_go(self) -> None:
        """Wait for nodes of other users to leave, if the folder is this user's: only its owner may remove it."""
        ends = time.monotonic() + STALE_SECONDS
        if self.place.folder.stat().st_uid != os.geteuid():
            return
        for other in self.others:
            while (card := self.card(other)) and card["uid"] != os.geteuid() and time.monotonic() < ends:
                self.pause(0.02)

    def _has_met(self, other: int) -> bool:
        """Return whether a node and this one have read each other's card."""
        card = self.card(other)
        if card is None:
            return False
        if self._met.get(other) != card["token"]:
            self._met[other] = card["token"]
            self._write_card()
        if card["met"].get(str(self.rank)) != self.token:
            return False
        self._came.add(other)
        if card["nodes"] != self.nodes:
            self.pause(2 * BEAT_SECONDS)  # so that it sees this node, too, before its card is gone
            raise Unmet(f"node {other} was started with --nodes {card['nodes']}, this one with --nodes {self.nodes}")
        return True

    def _refuse_living(self) -> None:
        """Raise Unmet if the card that is in the way belongs to a living process."""
        first, ends = self.card(self.rank), time.monotonic() + STALE_SECONDS
        while time.monotonic() < ends:
            if first is not None and is_dead(first):
                return
            card = self.card(self.rank)
            if first is not None and card is not None and card["beat"] != first["beat"]:
                raise Unmet(self._taken_by(card), [self.rank])
            first = first or card
            self.pause(0.05)

    def _taken_by(self, card: dict[str, Any]) -> str:
        """Return that another process has this node's rank."""
        return f"node rank {self.rank} is already taken by process {card['pid']} on {card['host']}"

    def _beat(self) -> None:
        """Write the card anew until the end, as long as it is this node's."""
        while not self._ending.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError, TypeError):  # the checks find and tell what is wrong with the folder
                card = self.card(self.rank)
                if card and card["token"] != self.token:
                    return
                self._write_card()

    def _write_card(self) -> None:
        """Write the card with one more beat."""
        with self._writing:
            self._beats += 1
            card = {
                "token": self.token,
                "nodes": self.nodes,
                "met": {str(rank): token for rank, token in self._met.items()},
                "beat": [self.token, self._beats],
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "uid": os.geteuid(),
                "machine": machine(),
            }
            write_whole(self._card(self.rank), card)

    def _card(self, rank: int) -> Path:
        """Return where a node's card lies."""
        return self.place.own(rank, CARD)


def write_whole(path: Path, value: Any) -> None:
    """Write a file under its name in one step, readable by every user."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.chmod(0o644)
    new.replace(path)


def read_json(path: Path) -> Any:
    """Return what a file holds; None while it is missing or not yet whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    except OSError as error:
        if error.errno in GONE:
            return None
        raise


def machine() -> str:
    """Return what tells this boot of this machine, and this container on it, from any other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def is_dead(card: dict[str, Any]) -> bool:
    """Return whether a card's process certainly is no more: it ran here, and its number is free."""
    return bool(card["machine"]) and card["machine"] == machine() and not Path(f"/proc/{card['pid']}").exists()
