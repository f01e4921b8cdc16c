"""How nodes meet in a shared folder: each has a card, posts what it has to say, and waits for what others post.

A card names its process by a token. Two nodes have met when each has noted the other's token: what a dead session left
behind can never note a fresh one. Clients of shared filesystems remember what files hold, how long they are, and that
a name was missing. So no file is ever written twice, and nobody asks for a name before the folder lists it. What is
left is the list itself: a client that changes a folder reads it anew, and each node changes it with every heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from simpletuner.system.signals import StopRequest
from simpletuner.tools.nfs.cards import is_dead, new_card
from simpletuner.tools.nfs.findings import ranks_in_words
from simpletuner.tools.nfs.place import CARD, Place, look_anew, read_json, write_whole

BEAT_SECONDS = 0.5
WAITING_BEAT_SECONDS = 0.1
"""Who waits looks anew more often."""
STALE_SECONDS = 3.0
"""A node that has no new heartbeat for so long is no more."""
CLAIM_ATTEMPTS = 20


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
        self._cards: dict[int, dict[str, Any]] = {}
        self._met: set[int] = set()
        self._lost: set[int] = set()
        self._beats, self._last_beat = 0, 0.0
        self._beating, self._ending = threading.Lock(), threading.Event()
        self._heart = threading.Thread(target=self._keep_beating, daemon=True)

    def claim(self) -> None:
        """Take this node's rank. Raises Unmet when a living process has it, OSError where nothing can be written."""
        for attempts_left in reversed(range(CLAIM_ATTEMPTS)):
            try:
                self.place.make()
                self._write_card()
                break
            except FileNotFoundError:  # the last node of an earlier check has just removed the folder
                if not attempts_left:
                    raise
            except FileExistsError:
                self._refuse_living()
                self.place.clear(self.rank)
        else:
            raise Unmet(f"node rank {self.rank} is claimed again and again by other processes", [self.rank])
        self.holds_rank = True
        self._beat()
        self._heart.start()

    def join(self, waiting: Callable[[list[int]], None]) -> None:
        """Meet all others. Calls `waiting` once with those that are late; raises Unmet when some do not come."""
        began, told = time.monotonic(), False
        while missing := self._missing():
            seconds = time.monotonic() - began
            if seconds > self.timeout_seconds:
                late = set(missing) - self._met or missing  # one that came may have lost patience before us
                raise Unmet(f"{ranks_in_words(late)} did not come within {self.timeout_seconds:g} s", late)
            if seconds > 1 and not told:
                waiting(missing)
                told = True
            self._wait_a_little(0.02)

    def post(self, name: str, value: Any = None) -> None:
        """Let the others read a value under a name of the present stage."""
        write_whole(self._post(self.rank, name), value)

    def wait(self, name: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what all others posted under a name. Raises Unmet when one failed, left, or is silent too long."""
        pending, values = set(self.others if ranks is None else ranks), {}
        deadline, pause_seconds = time.monotonic() + self.timeout_seconds, 0.002
        while True:
            listed = self._listed()
            for other in sorted(pending):
                if self._post(other, name).name in listed:
                    values[other] = json.loads(self._post(other, name).read_text(encoding="utf-8"))
            pending -= set(values)
            if not pending:
                return values
            self._check_others(pending, listed, deadline)
            self._wait_a_little(pause_seconds)
            pause_seconds = min(0.05, pause_seconds * 1.2)

    def gather(self, name: str, value: Any = None) -> dict[int, Any]:
        """Post a value and return those of all nodes, this one's included."""
        self.post(name, value)
        return {self.rank: value, **self.wait(name)}

    def stamp(self) -> os.stat_result:
        """Return what the filesystem notes of a file that this node has just written."""
        self.post("stamp")
        return self._post(self.rank, "stamp").stat()

    def abandon(self) -> None:
        """Tell the others not to wait for this node in the present stage."""
        with contextlib.suppress(OSError):
            self.post("failed")

    def token_of(self, other: int) -> str:
        """Return the token of a node that was met."""
        return self._cards[other]["token"]

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

    def _missing(self) -> list[int]:
        """Note whose cards are new, and return those who have not noted this node's."""
        listed = self._listed()
        for other in self.others:
            card = read_json(self._card(other)) if self._card(other).name in listed else None
            if card and card["token"] != self._cards.get(other, {}).get("token"):
                self._cards[other] = card
                self.place.own(self.rank, f"met.{card['token']}").touch()
        return [other for other in self.others if not self._has_met(other, listed)]

    def _has_met(self, other: int, listed: set[str]) -> bool:
        """Return whether a node has noted this one's token. Raises Unmet when it waits for another number of nodes."""
        if self.place.own(other, f"met.{self.token}").name not in listed or other not in self._cards:
            return False
        self._met.add(other)
        nodes = self._cards[other]["nodes"]
        if nodes != self.nodes:
            self.pause(2 * BEAT_SECONDS)  # so that it sees this node, too, before its card is gone
            raise Unmet(f"node {other} was started with --nodes {nodes}, this one with --nodes {self.nodes}")
        return self._card(other).name in listed

    def _check_others(self, pending: set[int], listed: set[str], deadline: float) -> None:
        """Raise Unmet when waiting has no sense any more."""
        for other in sorted(pending):
            if self._post(other, "failed").name in listed:
                raise Unmet(f"node {other} could not go on", [other])
            if other in self._lost or self.place.own(other, f"met.{self.token}").name not in listed:
                raise Unmet(f"node {other} ended before it was through", [other])
        if time.monotonic() > deadline:
            self._lost |= pending  # nobody waits for them again
            raise Unmet(f"{ranks_in_words(pending)} said nothing for {self.timeout_seconds:g} s", pending)

    def _let_strangers_go(self) -> None:
        """Wait for nodes of other users to leave, if the folder is this user's: only its owner may remove it."""
        ends, me = time.monotonic() + STALE_SECONDS, os.geteuid()
        strangers = {self._card(other).name for other in self.others if self._cards[other]["uid"] != me}
        if self.place.folder.stat().st_uid == me:
            while strangers & self._listed() and time.monotonic() < ends:
                self._wait_a_little(0.02)

    def _refuse_living(self) -> None:
        """Return when the card that is in the way belongs to nobody. Raises Unmet if its process lives."""
        beats, ends = self._beats_of(self.rank), time.monotonic() + STALE_SECONDS
        while time.monotonic() < ends:
            card = read_json(self._card(self.rank))
            if card and is_dead(card):
                return
            if card and self._beats_of(self.rank) - beats:
                who = f"process {card['pid']} on {card['host']}"
                raise Unmet(f"node rank {self.rank} is already taken by {who}", [self.rank])
            look_anew(self.place.folder)
            self.pause(0.05)

    def _beats_of(self, rank: int) -> set[str]:
        """Return the heartbeats that a node left lately."""
        return {name for name in self._listed() if name.startswith(self.place.own(rank, "beat.").name)}

    def _keep_beating(self) -> None:
        """Show until the end that this node lives."""
        while not self._ending.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the checks find and tell what is wrong with the folder
                self._beat()

    def _beat(self) -> None:
        """Write a new heartbeat and remove the last one."""
        with self._beating:
            self._last_beat = time.monotonic()
            before = self.place.own(self.rank, f"beat.{self.token}.{self._beats}")
            self._beats += 1
            self.place.own(self.rank, f"beat.{self.token}.{self._beats}").touch()
            before.unlink(missing_ok=True)

    def _wait_a_little(self, seconds: float) -> None:
        """Pause before looking at the folder again; now and then make the filesystem look, too."""
        self.pause(seconds)
        if time.monotonic() - self._last_beat > WAITING_BEAT_SECONDS:
            self._beat()

    def _write_card(self) -> None:
        """Write the card. Raises FileExistsError when there is one."""
        descriptor = os.open(self._card(self.rank), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self.holds_rank = True
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(new_card(self.token, self.nodes), file)

    def _listed(self) -> set[str]:
        """Return the names in the folder."""
        return set(os.listdir(self.place.folder))  # noqa: PTH208 - names are all that is wanted

    def _card(self, rank: int) -> Path:
        """Return where a node's card lies."""
        return self.place.own(rank, CARD)

    def _post(self, rank: int, name: str) -> Path:
        """Return where a node posts something in the present stage."""
        token = self.token if rank == self.rank else self.token_of(rank)
        return self.place.own(rank, f"{token}.{self.stage}.{name}.json")
