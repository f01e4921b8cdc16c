"""Machines, or ranks, find out through a store whether they agree, before any of them starts to work.

The first one's card is the measure. Everybody else compares with it and only then puts down a card, so that all cards
together mean that all agree. Who disagrees says so in the store, and everybody who waits there ends with that sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from simpletuner.errors import EnvironmentNotReady, RemoteFailure, SettingsError, SimpleTunerError, Stopped
from simpletuner.launch.node_info import NodeInfo, difference, parse_node_info
from simpletuner.launch.signing import SECRET, MessageSigner, printable
from simpletuner.launch.termination import failure_code

if TYPE_CHECKING:
    from torch.distributed import Store

Message = TypeVar("Message")

POLL_SECONDS = 0.05
QUIET_SECONDS = 5
"""How long waiting needs no explanation."""
ATTEMPTS = 10
"""How often a key is written that a stranger overwrites; who does that all the time prevents the run."""


@dataclass(frozen=True)
class Group:
    """Who meets: `machine` or `rank`, the number of this one, how many there are, and how they sign."""

    kind: str
    number: int
    count: int
    seal: MessageSigner = field(default_factory=MessageSigner)

    def name(self, number: int) -> str:
        """Return how one of them is called."""
        return f"{self.kind} {number}"

    def key(self, what: object) -> str:
        """Return the name under which the store holds something."""
        return f"agreement/{self.kind}/{what}"


def verify_same_config(
    store: Store,
    seats: Group,
    card: NodeInfo,
    check: Callable[[], None],
    patience_seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> list[NodeInfo]:
    """Return everybody's card once all are here and agree with the first one.

    Raises the error of whoever disagreed, for all that wait; `check` may raise to end the waiting.
    """
    try:
        register(store, seats, card, check, patience_seconds)
        wait_for_all(store, seats, check, patience_seconds, say)
    except RemoteFailure:
        raise
    except SimpleTunerError as error:
        reject(store, seats, error, card)
        raise
    return [found for number in range(seats.count) if (found := read_card(store, seats, number))]


def register(store: Store, seats: Group, card: NodeInfo, check: Callable[[], None], patience_seconds: float) -> None:
    """Compare with the first card, then put down this one. Raises SettingsError where the seat is taken."""
    if seats.number:
        end = time.monotonic() + patience_seconds
        while not store.check([seats.key(0)]) and time.monotonic() < end:
            poll(store, seats, check)
        first = first_card(store, seats) if store.check([seats.key(0)]) else card
        if error := difference(first, seats.name(0), card, seats.name(seats.number)):
            raise error
    holder = put_first(store, seats.seal, seats.key(seats.number), card.as_json(), parse_node_info)
    if holder != card:
        raise SettingsError(
            f"{seats.kind}_rank = {seats.number} is used twice: by {holder.host} (pid {holder.pid}) "
            f"and by {card.host} (pid {card.pid})",
            f"give every machine its own --machine_rank, from 0 to {seats.count - 1}",
        )
    store.add(seats.key("came"), 1)


def first_card(store: Store, seats: Group) -> NodeInfo:
    """Return the card that is the measure. Raises SettingsError when it is not signed as this process would."""
    card = read_card(store, seats, 0)
    if card is None:
        with_secret = (
            "with another run secret, or none" if seats.seal.secret else "with a run secret, which is not here"
        )
        raise SettingsError(
            f"{seats.name(0)} signs its messages {with_secret}",
            f"give all machines the same secret, in {SECRET} or by --run_secret_file",
        )
    return card


def put_first(
    store: Store,
    seal: MessageSigner,
    key: str,
    values: Mapping[str, Any],
    parse: Callable[[Mapping[str, Any] | None], Message | None],
) -> Message:
    """Write a message unless a valid one is there already; return the one that stands. Nonsense is overwritten."""
    mine, there = seal.write(key, values), b""
    for _ in range(ATTEMPTS):
        holder = store.compare_set(key, there, mine)  # pyright: ignore[reportArgumentType] (bytes are taken, too)
        if (found := parse(seal.read(key, holder))) is not None:
            return found
        there = holder
    raise EnvironmentNotReady(
        f"somebody else writes to `{key}` in the store of this run", "use a network that you trust"
    )


def wait_for_all(
    store: Store, seats: Group, check: Callable[[], None], patience_seconds: float, say: Callable[[str], None]
) -> None:
    """Wait until all cards are there. Raises EnvironmentFault that names who is missing."""
    began, said = time.monotonic(), False
    while (came := store.add(seats.key("came"), 0)) < seats.count or absent(store, seats):
        waited = time.monotonic() - began
        if waited > QUIET_SECONDS and not said:
            say(f"{came} of {seats.count} {seats.kind}s came; waiting up to {patience_seconds:.0f} s for the others")
            said = True
        if waited > patience_seconds:
            raise EnvironmentNotReady(
                f"waited {waited:.0f} s: {came} of {seats.count} {seats.kind}s came; "
                f"missing: {', '.join(map(seats.name, absent(store, seats)))}{unsigned(seats)}",
                "look at the output there, or wait longer with --node_join_timeout",
            )
        poll(store, seats, check)


def absent(store: Store, seats: Group) -> list[int]:
    """Return who has not put down a valid card."""
    return [number for number in range(seats.count) if read_card(store, seats, number) is None]


def unsigned(seats: Group) -> str:
    """Return a remark where messages were ignored."""
    return (
        f" (ignored what was not signed with the secret of this run, such as `{name}`)"
        if (name := seats.seal.ignored)
        else ""
    )


def poll(store: Store, seats: Group, check: Callable[[], None]) -> None:
    """Wait a moment. Raises PassedOn with what somebody else refused."""
    check()
    key = seats.key("refused")
    if store.check([key]) and (told := refusal_from(seats.seal.read(key, store.get(key)))):
        raise told
    time.sleep(POLL_SECONDS)


def reject(store: Store, seats: Group, error: SimpleTunerError, card: NodeInfo) -> None:
    """Tell all that wait why there will be no run."""
    place = f"{seats.name(seats.number)} ({card.host}): " if isinstance(error, Stopped) else ""
    told = {"exit_code": int(error.exit_code), "message": place + error.message, "hint": error.hint}
    put_first(store, seats.seal, seats.key("refused"), told, refusal_from)


def refusal_from(values: Mapping[str, Any] | None) -> RemoteFailure | None:
    """Return the error that ends all that wait; None if a message is none."""
    match values:
        case {"exit_code": int(code), "message": str(message), "hint": str(hint)}:
            return RemoteFailure(failure_code(code), printable(message), printable(hint))
    return None


def read_card(store: Store, seats: Group, number: int) -> NodeInfo | None:
    """Return the card on a seat; None if there is no valid one."""
    key = seats.key(number)
    return parse_node_info(seats.seal.read(key, store.get(key))) if store.check([key]) else None
