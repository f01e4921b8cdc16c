"""Start this machine's ranks together with those of the others, and see all of them to the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from simpletuner.errors import EnvironmentNotReady, SimpleTunerError
from simpletuner.launch.environment import visible_gpus
from simpletuner.launch.monitor import PeerMonitor
from simpletuner.launch.node_info import NodeInfo, check_addresses, node_info
from simpletuner.launch.plan import plan_of
from simpletuner.launch.ranks import Ranks, inherited_environment
from simpletuner.launch.registration import Group, verify_same_config
from simpletuner.launch.rendezvous import connect, serve
from simpletuner.launch.signing import MessageSigner, message_signer
from simpletuner.launch.stall_detection import StallDetector
from simpletuner.launch.termination import Termination, asked_to_stop, rank_died, rank_hangs_after_failing, rank_stalled
from simpletuner.report import Report
from simpletuner.settings import Loaded
from simpletuner.system.signals import StopRequest, handle_stop_signals

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.1
SAVE_ON_SIGNAL_SECONDS = 900
"""How long ranks may take to save after SIGTERM or Ctrl-C before they are killed."""
LINGER_SECONDS = 1.0
"""How long machine 0 goes on serving the store when machines do not agree, so that all of them hear it."""
LAST_WORDS_SECONDS = 15
"""How long ranks may take to end when another failed; one that waits for it in a collective never does."""


@dataclass(frozen=True)
class SupervisedRun:
    """What the launcher of one machine looks after."""

    ranks: Ranks
    watch: PeerMonitor
    stop: StopRequest
    stalls: StallDetector


def launch_ranks(loaded: Loaded, arguments: Sequence[str]) -> None:
    """Run `simpletuner ARGUMENTS` once per rank of this machine, and end as the run ends on all machines.

    Raises SettingsError or EnvironmentFault when machines do not meet or disagree; leaves with the exit code of the
    first rank that failed, after a sentence unless that rank has said one here.
    """
    launch, inherited = loaded.settings.launch, inherited_environment()
    visible_gpus(launch)  # finds wrong gpu_ids before anybody waits
    seal, ranks = message_signer(launch.run_secret_file), Ranks(inherited)
    with handle_stop_signals(ranks.unsaved) as stop:
        stop.before_exit = ranks.kill
        served = serve(launch) if launch.machine_rank == 0 else None
        store = served if served and launch.num_machines == 1 else connect(launch, stop.check, Report().say)
        cards = meet(store, loaded, stop.check, seal)
        names = [f"machine {number} ({card.host})" for number, card in enumerate(cards)]
        plan = plan_of(launch.machine_rank, launch, arguments, store.port)
        log_ranks(launch.machine_rank, names, plan.ranks)
        seal = seal.for_run(cards[0].nonce)
        with (
            PeerMonitor(store, launch.machine_rank, names, launch.node_timeout, seal=seal) as watch,
            ranks.started(plan.command, dict(zip(plan.ranks, plan.environments(), strict=True))),
        ):
            run = SupervisedRun(ranks, watch, stop, StallDetector(ranks, launch.stall_timeout))
            ending = supervise(run)
            if ending is not None:
                shut_down(run, ending)
            watch.leave(SAVE_ON_SIGNAL_SECONDS)
    if ending is not None:
        exit_with_reason(ending, run)


def meet(store: TCPStore, loaded: Loaded, check: Callable[[], None], seal: MessageSigner) -> list[NodeInfo]:
    """Return the cards of all machines once they agree; machine 0 stays until all that came know why they do not."""
    from torch.distributed import DistError, PrefixStore

    launch = loaded.settings.launch
    seats = Group("machine", launch.machine_rank, launch.num_machines, seal)
    keys, card = PrefixStore("launchers", store), node_info(loaded)
    try:
        cards = verify_same_config(keys, seats, card, check, launch.node_join_timeout, Report().say)
        check_addresses(cards)
        return cards
    except SimpleTunerError:
        time.sleep(LINGER_SECONDS if launch.machine_rank == 0 and launch.num_machines > 1 else 0)
        raise
    except DistError:
        place = f"{launch.main_process_ip}:{launch.main_process_port}"
        raise EnvironmentNotReady(f"machine 0 at {place} left before all had met", "look at the output there") from None


def log_ranks(here: int, names: Sequence[str], ranks: range) -> None:
    """Say what this machine does, where there are several: only machine 0 shows how the run goes."""
    if len(names) > 1:
        run = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        place = "" if here == 0 else f"; progress is shown on {names[0]}"
        Report().say(f"{names[here]} of {len(names)} runs {run}{place}")


def supervise(run: SupervisedRun) -> Termination | None:
    """Wait until all ranks of all machines have finished, or return why the run ends before."""
    ranks, watch, warned = run.ranks, run.watch, False
    while True:
        ranks.listen()
        watch.phase, watch.lost_contact = ranks.phase, ranks.lost_contact
        if ending := early_end(run):
            return ending
        if not ranks.alive:
            watch.state = "finished"
            if watch.others_are("finished", "left"):
                return None
        if watch.seal.ignored and not warned:
            warned = True
            Report().warn(f"ignored what a stranger wrote into the store of this run, under `{watch.seal.ignored}`")
        time.sleep(POLL_SECONDS)


def early_end(run: SupervisedRun) -> Termination | None:
    """Return why the run must end now, told to all machines; None while all is well."""
    ranks, watch, here = run.ranks, run.watch, run.watch.here
    if run.stop.signal_number:
        return watch.tell(asked_to_stop(here, run.stop.signal_number))
    if watch.ending:
        return watch.ending
    if death := ranks.first_death():
        ranks.listen()  # what it sent before it ended
        return watch.tell(rank_died(here, death).with_reason(ranks.reason))
    if ranks.reason and time.monotonic() - ranks.failed_at > LAST_WORDS_SECONDS:
        return watch.tell(rank_hangs_after_failing(here, ranks.reason))
    if stall := run.stalls.find(watch.phase_elsewhere):
        return watch.tell(rank_stalled(here, stall))
    if silent := watch.silent():
        return watch.tell(silent)
    return None


def shut_down(run: SupervisedRun, ending: Termination) -> None:
    """Ask the ranks to end, with time to save where a signal asked for the end, and kill those that do not."""
    ranks, watch = run.ranks, run.watch
    if ending.signal_number and ending.machine != watch.here:
        Report().say(f"{watch.names[ending.machine]} was asked to stop; the ranks here save and stop with it")
    ranks.ask(ending.signal_number or signal.SIGTERM)
    end = time.monotonic() + (SAVE_ON_SIGNAL_SECONDS if ending.signal_number else LAST_WORDS_SECONDS)
    while ranks.alive and time.monotonic() < end and not watch.silent():
        ranks.listen()
        if stall := run.stalls.find(watch.phase_elsewhere):
            if ending.signal_number:
                Report().warn(f"{stall}; stopping without saving")
            break
        time.sleep(POLL_SECONDS)
    ranks.kill()
    ranks.listen()


def exit_with_reason(ending: Termination, run: SupervisedRun) -> NoReturn:
    """Leave with the exit code of the run, and say why unless a rank of this machine has."""
    if (ending.said and ending.machine == run.watch.here) or ending.is_explained_by(run.ranks.reason):
        raise SystemExit(ending.exit_code)
    raise ending.error(run.watch.here, run.watch.names)
