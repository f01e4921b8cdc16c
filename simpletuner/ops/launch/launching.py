"""Start this machine's ranks together with those of the others, and see all of them to the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from simpletuner.errors import EnvironmentFault, SimpleTunerError
from simpletuner.ops.launch.agreement import Seats, agree
from simpletuner.ops.launch.cards import Card, card_of, check_addresses
from simpletuner.ops.launch.ending import Ending, asked_to_stop, rank_died
from simpletuner.ops.launch.environment import visible_gpus
from simpletuner.ops.launch.meeting import connect, serve
from simpletuner.ops.launch.plan import plan_of
from simpletuner.ops.launch.ranks import Ranks, inherited_environment
from simpletuner.ops.launch.watch import Watch
from simpletuner.ops.signals import StopRequest, listening
from simpletuner.report import Report
from simpletuner.settings import Loaded

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.1
SAVE_ON_SIGNAL_SECONDS = 900
"""How long ranks may take to save after SIGTERM or Ctrl-C before they are killed."""
LINGER_SECONDS = 1.0
"""How long machine 0 goes on serving the store when machines do not agree, so that all of them hear it."""
LAST_WORDS_SECONDS = 15
"""How long ranks may take to end when another failed; one that waits for it in a collective never does."""


def launch_ranks(loaded: Loaded, arguments: Sequence[str]) -> None:
    """Run `simpletuner ARGUMENTS` once per rank of this machine, and end as the run ends on all machines.

    Raises SettingsError or EnvironmentFault when machines do not meet or disagree; leaves with the exit code of the
    first rank that failed, after a sentence unless that rank has said one here.
    """
    launch, inherited = loaded.settings.launch, inherited_environment()
    visible_gpus(launch)  # finds wrong gpu_ids before anybody waits
    with listening() as stop:
        served = serve(launch) if launch.machine_rank == 0 else None
        store = served if served and launch.num_machines == 1 else connect(launch, stop.check, Report().say)
        cards = meet(store, loaded, stop.check)
        names = [f"machine {number} ({card.host})" for number, card in enumerate(cards)]
        plan = plan_of(launch.machine_rank, launch, arguments, store.port)
        introduce(launch.machine_rank, names, plan.ranks)
        with Watch(store, launch.machine_rank, names, launch.node_timeout) as watch, Ranks(plan, inherited) as ranks:
            ending = see_to_the_end(ranks, watch, stop)
            if ending is not None:
                wind_down(ranks, watch, ending)
            watch.leave(SAVE_ON_SIGNAL_SECONDS)
    if ending is not None:
        give_reason(ending, watch)


def meet(store: TCPStore, loaded: Loaded, check: Callable[[], None]) -> list[Card]:
    """Return the cards of all machines once they agree; machine 0 stays until all that came know why they do not."""
    from torch.distributed import DistError, PrefixStore

    launch = loaded.settings.launch
    seats = Seats("machine", launch.machine_rank, launch.num_machines)
    keys, card = PrefixStore("launchers", store), card_of(loaded)
    try:
        cards = agree(keys, seats, card, check, launch.node_join_timeout, Report().say)
        check_addresses(cards)
        return cards
    except SimpleTunerError:
        time.sleep(LINGER_SECONDS if launch.machine_rank == 0 and launch.num_machines > 1 else 0)
        raise
    except DistError:
        place = f"{launch.main_process_ip}:{launch.main_process_port}"
        raise EnvironmentFault(f"machine 0 at {place} left before all had met", "look at the output there") from None


def introduce(here: int, names: Sequence[str], ranks: range) -> None:
    """Say what this machine does, where there are several: only machine 0 shows how the run goes."""
    if len(names) > 1:
        run = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        place = "" if here == 0 else f"; progress is shown on {names[0]}"
        Report().say(f"{names[here]} of {len(names)} runs {run}{place}")


def see_to_the_end(ranks: Ranks, watch: Watch, stop: StopRequest) -> Ending | None:
    """Wait until all ranks of all machines have finished, or return why the run ends before."""
    while True:
        if ending := early_end(ranks, watch, stop):
            return ending
        if not ranks.alive:
            watch.state = "finished"
            if watch.others_are("finished", "left"):
                return None
        time.sleep(POLL_SECONDS)


def early_end(ranks: Ranks, watch: Watch, stop: StopRequest) -> Ending | None:
    """Return why the run must end now, told to all machines; None while all is well."""
    here = watch.here
    if stop.signal_number:
        return watch.tell(asked_to_stop(here, stop.signal_number))
    if watch.ending:
        return watch.ending
    if death := ranks.first_death():
        return watch.tell(rank_died(here, death))
    if silent := watch.silent():
        return watch.tell(silent)
    return None


def wind_down(ranks: Ranks, watch: Watch, ending: Ending) -> None:
    """Ask the ranks to end, with time to save where a signal asked for the end, and kill those that do not."""
    ranks.ask(ending.signal_number or signal.SIGTERM)
    end = time.monotonic() + (SAVE_ON_SIGNAL_SECONDS if ending.signal_number else LAST_WORDS_SECONDS)
    while ranks.alive and time.monotonic() < end and not watch.silent():
        time.sleep(POLL_SECONDS)
    ranks.kill()


def give_reason(ending: Ending, watch: Watch) -> NoReturn:
    """Leave with the exit code of the run, and say why unless a rank of this machine has."""
    if (ending.said and ending.machine == watch.here) or ending.is_explained_by(watch.reason):
        raise SystemExit(ending.exit_code)
    raise ending.error(watch.here, watch.names)
