"""Machines, or ranks, find out through a store whether they agree, before any of them starts to work.

The first one's card is the measure. Everybody else compares with it and only then puts down a card, so that all cards
together mean that all agree. Who disagrees says so in the store, and everybody who waits there ends with that sentence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simpletuner.errors import EnvironmentFault, PassedOn, SettingsError, SimpleTunerError, Stopped
from simpletuner.ops.launch.cards import Card, difference

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.05
QUIET_SECONDS = 5
"""How long waiting needs no explanation."""


@dataclass(frozen=True)
class Seats:
    """Who meets: `machine` or `rank`, the number of this one, and how many there are."""

    kind: str
    number: int
    count: int

    def name(self, number: int) -> str:
        """Return how one of them is called."""
        return f"{self.kind} {number}"

    def key(self, what: object) -> str:
        """Return the name under which the store holds something."""
        return f"agreement/{self.kind}/{what}"


def agree(
    store: Store,
    seats: Seats,
    card: Card,
    check: Callable[[], None],
    patience_seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> list[Card]:
    """Return everybody's card once all are here and agree with the first one.

    Raises the error of whoever disagreed, for all that wait; `check` may raise to end the waiting.
    """
    try:
        take_seat(store, seats, card, check, patience_seconds)
        wait_for_all(store, seats, check, patience_seconds, say)
    except PassedOn:
        raise
    except SimpleTunerError as error:
        refuse(store, seats, error, card)
        raise
    return [read_card(store, seats, number) for number in range(seats.count)]


def take_seat(store: Store, seats: Seats, card: Card, check: Callable[[], None], patience_seconds: float) -> None:
    """Compare with the first card, then put down this one. Raises SettingsError where the seat is taken."""
    if seats.number:
        end = time.monotonic() + patience_seconds
        while not store.check([seats.key(0)]) and time.monotonic() < end:
            look_around(store, seats, check)
        first = read_card(store, seats, 0) if store.check([seats.key(0)]) else card
        if error := difference(first, seats.name(0), card, seats.name(seats.number)):
            raise error
    mine = json.dumps(card.as_json())
    holder = store.compare_set(seats.key(seats.number), "", mine).decode()
    if holder != mine:
        other = Card(**json.loads(holder))
        raise SettingsError(
            f"{seats.kind}_rank = {seats.number} is used twice: by {other.host} (pid {other.pid}) "
            f"and by {card.host} (pid {card.pid})",
            f"give every machine its own --machine_rank, from 0 to {seats.count - 1}",
        )
    store.add(seats.key("came"), 1)


def wait_for_all(
    store: Store, seats: Seats, check: Callable[[], None], patience_seconds: float, say: Callable[[str], None]
) -> None:
    """Wait until all cards are there. Raises EnvironmentFault that names who is missing."""
    began, said = time.monotonic(), False
    while (came := store.add(seats.key("came"), 0)) < seats.count:
        waited = time.monotonic() - began
        if waited > QUIET_SECONDS and not said:
            say(f"{came} of {seats.count} {seats.kind}s came; waiting up to {patience_seconds:.0f} s for the others")
            said = True
        if waited > patience_seconds:
            absent = [number for number in range(seats.count) if not store.check([seats.key(number)])]
            raise EnvironmentFault(
                f"waited {waited:.0f} s: {came} of {seats.count} {seats.kind}s came; "
                f"missing: {', '.join(map(seats.name, absent))}",
                "look at the output there, or wait longer with --node_join_timeout",
            )
        look_around(store, seats, check)


def look_around(store: Store, seats: Seats, check: Callable[[], None]) -> None:
    """Wait a moment. Raises PassedOn with what somebody else refused."""
    check()
    if store.check([seats.key("refused")]):
        raise PassedOn(**json.loads(store.get(seats.key("refused"))))
    time.sleep(POLL_SECONDS)


def refuse(store: Store, seats: Seats, error: SimpleTunerError, card: Card) -> None:
    """Tell all that wait why there will be no run."""
    place = f"{seats.name(seats.number)} ({card.host}): " if isinstance(error, Stopped) else ""
    told = {"exit_code": int(error.exit_code), "message": place + error.message, "hint": error.hint}
    store.compare_set(seats.key("refused"), "", json.dumps(told))


def read_card(store: Store, seats: Seats, number: int) -> Card:
    """Return the card on a seat; it must be there."""
    return Card(**json.loads(store.get(seats.key(number))))
