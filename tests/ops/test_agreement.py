"""How machines, or ranks, agree: many at one store, each in a thread of its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from simpletuner.errors import EnvironmentFault, ExitCode, PassedOn, SettingsError, SimpleTunerError, Stopped
from simpletuner.ops.launch.agreement import Seats, agree
from simpletuner.ops.launch.cards import Card
from simpletuner.ops.launch.ending import Ending, asked_to_stop, rank_died
from simpletuner.ops.launch.ranks import Death
from simpletuner.ops.launch.watch import Watch
from simpletuner.ops.signals import StopRequest


def card(host: str, **settings: object) -> Card:
    return Card(host, 1, settings, {"torch": "2.9"})


def outcome(store: object, seats: Seats, mine: Card, check=lambda: None, patience: float = 20) -> object:
    try:
        return agree(store, seats, mine, check, patience)  # pyright: ignore[reportArgumentType]
    except SimpleTunerError as error:
        return error


def outcomes(cards: list[Card], numbers: list[int] | None = None) -> list[object]:
    """Return what each of some machines gets to hear; the last ones come late."""
    store, numbers = HashStore(), numbers or list(range(len(cards)))

    def come(place: int) -> object:
        time.sleep(0.1 * place)
        return outcome(store, Seats("machine", numbers[place], len(cards)), cards[place])

    with ThreadPoolExecutor(len(cards)) as pool:
        return list(pool.map(come, range(len(cards))))


def test_all_get_all_cards_once_the_last_has_come():
    cards = [card(host, seed=1) for host in "abc"]
    assert outcomes(cards) == [cards] * 3


def test_what_one_refuses_ends_all_that_wait_with_the_same_sentence():
    told = outcomes([card("a", seed=1), card("b", seed=1), card("c", seed=2)])
    sentence = "seed differs: 1 on machine 0 (a), 2 on machine 2 (c)"
    assert [str(error) for error in told] == [sentence] * 3
    assert [type(error) for error in told] == [PassedOn, PassedOn, SettingsError]
    assert [error.exit_code for error in told if isinstance(error, SimpleTunerError)] == [ExitCode.USAGE] * 3


def test_a_seat_is_taken_once():
    told = outcomes([card("a"), card("b"), card("c")], numbers=[0, 1, 1])
    assert {str(error) for error in told} == {"machine_rank = 1 is used twice: by b (pid 1) and by c (pid 1)"}


def test_who_does_not_come_is_named_to_all():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        seats = [Seats("machine", number, 4) for number in (0, 2)]
        told = list(pool.map(lambda seat: outcome(store, seat, card("x"), patience=0.5), seats))
    assert {str(error).partition(": ")[2] for error in told} == {"2 of 4 machines came; missing: machine 1, machine 3"}
    assert {getattr(error, "exit_code", None) for error in told} == {EnvironmentFault.exit_code}


def test_a_signal_to_one_ends_all_that_wait():
    store, stop = HashStore(), StopRequest()
    stop.signal_number = 15
    told = [
        outcome(store, Seats("machine", 0, 3), card("a"), stop.check),
        outcome(store, Seats("machine", 1, 3), card("b")),
    ]
    assert isinstance(told[0], Stopped)
    assert isinstance(told[1], PassedOn)
    assert (told[1].exit_code, told[1].message.partition(" before")[0]) == (143, "machine 0 (a): stopped by SIGTERM")


def test_machines_hear_one_another_and_the_first_reason_counts():
    store, names = HashStore(), ["machine 0 (a)", "machine 1 (b)"]
    with Watch(store, 0, names, 30) as first, Watch(store, 1, names, 30) as second:
        death = rank_died(1, Death(3, 77, -9))
        assert second.tell(death) == death
        assert first.tell(asked_to_stop(0, 15)) == death
        assert not first.others_are("finished", "left")
        second.leave(5)
        first.leave(5)
        assert first.others_are("left")
        assert first.silent() is second.silent() is None
    error = death.error(0, names)
    assert (error.exit_code, error.message) == (5, "machine 1 (b): rank 3 (pid 77) was killed by SIGKILL")
    assert death.error(1, names).message == "rank 3 (pid 77) was killed by SIGKILL"


def test_a_machine_that_is_not_heard_is_silent_sooner_where_ranks_have_lost_contact():
    store, names = HashStore(), ["machine 0 (a)", "machine 1 (b)"]
    with Watch(store, 0, names, 60, suspect_seconds=0.3) as watch:
        time.sleep(0.5)
        assert watch.silent() is None
        PrefixStore("simpletuner", store).set("lost", "0")
        end = time.monotonic() + 5
        while not (ending := watch.silent()) and time.monotonic() < end:
            time.sleep(0.05)
    assert ending is not None
    assert ending.sentence.startswith("machine 1 (b) has been silent for ")
    assert (ending.exit_code, ending.signal_number) == (5, 0)


def test_the_sentence_of_a_rank_travels_to_the_other_machines():
    store = HashStore()
    reason = '{"rank": 2, "exit_code": 4, "message": "no pictures", "hint": "add some"}'
    PrefixStore("simpletuner", store).set("failures/0/reason", reason)
    with Watch(store, 0, ["machine 0 (a)"], 30) as watch:
        told = watch.tell(rank_died(0, Death(2, 77, 4)))
    assert told == Ending(0, 4, "rank 2: no pictures", "add some", said=True)
    assert told.is_explained_by(watch.reason)
    assert not Ending(0, 5, "something else").is_explained_by(watch.reason)


def test_a_store_that_is_gone_silences_the_machine_that_served_it():
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store = TCPStore("127.0.0.1", served.port, timeout=timedelta(seconds=5), wait_for_workers=False)
    with Watch(store, 1, ["machine 0 (a)", "machine 1 (b)"], 1.5) as watch:
        assert watch.silent() is None
        del served
        end = time.monotonic() + 10
        while not (ending := watch.silent()) and time.monotonic() < end:
            time.sleep(0.05)
        assert ending is not None
        began = time.monotonic()
        assert watch.tell(ending) == ending
        assert time.monotonic() - began < 1, "there is nobody to wait for"
    assert ending.sentence.startswith("machine 0 (a) has been silent for ")


@pytest.mark.parametrize(("code", "number"), [(143, 15), (130, 2), (5, 0), (2, 0)])
def test_only_an_orderly_stop_gives_ranks_time_to_save(code, number):
    assert rank_died(0, Death(0, 1, code)).signal_number == number
