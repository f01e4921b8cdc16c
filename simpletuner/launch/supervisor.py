"""The launcher of one machine: rendezvous with the others, start the ranks, supervise them, shut them down.

Not torchrun's agent: it reports a dead rank only after it has ended the others of that machine (up to 30 s),
and learns nothing from other machines while ranks run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from simpletuner.errors import SIGNAL_CODES, EnvironmentNotReady
from simpletuner.launch.heartbeat import PeerMonitor
from simpletuner.launch.node_info import NodeInfo, check_addresses, node_info
from simpletuner.launch.plan import plan_of, visible_gpus
from simpletuner.launch.preemption import watch_preemption
from simpletuner.launch.ranks import Ranks, inherited_environment
from simpletuner.launch.rendezvous import Group, connect, serve, verify_same_config
from simpletuner.launch.stall_detection import StallDetector, dumps_at, prefix_in, where_dumps_are
from simpletuner.launch.store import MessageSigner, MessageStore, TorchStore, message_signer
from simpletuner.launch.termination import (
    Termination,
    launcher_signaled,
    rank_failed,
    rank_hangs_after_failing,
    rank_stalled,
)
from simpletuner.report import Report
from simpletuner.run_log import LOG, write_log_to
from simpletuner.settings import Loaded
from simpletuner.system.processes.run_status import RunState, StatusWriter
from simpletuner.system.processes.signals import StopRequest, handle_stop_signals

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.1
SAVE_ON_SIGNAL_SECONDS = 900
"""Seconds for ranks to save after a signal, before they are killed."""
# Seconds for ranks to exit after another's failure: it may still write its report, and they theirs.
EXIT_SECONDS = 15
# The same when another one is known to be dead. What a survivor does then needs the dead one, too: a
# collective, whose wait SIGTERM does not end, or a checkpoint, which all ranks write and which counts only
# when all have.
DEAD_PEER_EXIT_SECONDS = 4


@dataclass(frozen=True)
class SupervisedRun:
    ranks: Ranks
    peers: PeerMonitor
    stop: StopRequest
    stalls: StallDetector


def launch_ranks(loaded: Loaded, arguments: Sequence[str], run_folder: Path | None) -> None:
    """Run `simpletuner ARGUMENTS` once per rank of this machine, until the run ends on all machines.

    `run_folder` gets the launcher's part of the status and the log; None for what is not a run.

    Raises SettingsError or EnvironmentNotReady when the rendezvous fails. Exits with the exit code of the
    first rank that failed, and prints why unless that rank has printed it here.
    """
    # the environment as the user set it, before torch is silenced for this process alone
    launch, inherited = loaded.settings.launch, inherited_environment()
    visible_gpus(launch)  # refuses wrong gpu_ids before any machine waits for another
    signer, ranks = message_signer(launch.run_secret_file), Ranks(inherited)
    prefix = prefix_in(run_folder, inherited) if run_folder is not None else None
    dumps = dumps_at(prefix) if prefix is not None else {}
    with handle_stop_signals(ranks.unsaved) as stop:
        status = StatusWriter()
        if run_folder is not None:
            status.supervise(run_folder)
        stop.before_exit, stop.save_seconds = partial(kill_ranks, ranks, status), ranks.save_seconds
        served = serve(launch) if launch.machine_rank == 0 else None
        # several machines: machine 0 connects too, to find out whether main_process_ip leads to itself
        store = served if served and launch.num_machines == 1 else connect(launch, stop.check, Report().say)
        infos = rendezvous(store, loaded, stop.check, signer)
        names = [f"machine {number} ({info.host})" for number, info in enumerate(infos)]
        plan = plan_of(launch.machine_rank, launch, arguments, store.port)
        if run_folder is not None:
            write_log_to(run_folder / LOG, create=False)  # the first rank makes it
        log_ranks(launch.machine_rank, names, plan.ranks)
        # from here on messages of another run with the same secret are rejected, even recorded ones
        messages = MessageStore(TorchStore(store), signer.for_run(infos[0].nonce))
        with (
            PeerMonitor(messages, launch.machine_rank, names, launch.node_timeout) as peers,
            ranks.started(plan.command, dict(zip(plan.ranks, plan.environments(), strict=True))),
            watch_preemption(launch.preemption_check, stop),
        ):
            run = SupervisedRun(ranks, peers, stop, StallDetector(ranks, launch.stall_timeout))
            termination = supervise(run)
            if termination is not None:
                if termination.stalled and prefix is not None:
                    ranks.request_dumps()
                shut_down(run, termination)
            peers.leave(SAVE_ON_SIGNAL_SECONDS)
    if termination is not None:
        if prefix is not None and (place := where_dumps_are(prefix, dumps)):
            termination = replace(termination, hint="; ".join(filter(None, (termination.hint, place))))
        status.fail(termination.error(launch.machine_rank, names))  # unless the failed rank has written why
        exit_with_reason(termination, run)


def kill_ranks(ranks: Ranks, status: StatusWriter, sentence: str) -> None:
    """Leave without saving."""
    ranks.kill()
    status.end(RunState.STOPPED, sentence)


def rendezvous(store: TCPStore, loaded: Loaded, check: Callable[[], None], signer: MessageSigner) -> list[NodeInfo]:
    """Wait for all machines and verify that they agree; return what each of them registered."""
    from torch.distributed import DistError, PrefixStore

    launch = loaded.settings.launch
    group = Group("machine", launch.machine_rank, launch.num_machines)
    messages = MessageStore(TorchStore(PrefixStore("launchers", store)), signer)
    try:
        infos = verify_same_config(messages, group, node_info(loaded), check, launch.node_join_timeout, Report().say)
        check_addresses(infos)
        return infos
    except DistError:
        place = f"{launch.main_process_ip}:{launch.main_process_port}"
        raise EnvironmentNotReady(
            f"machine 0 at {place} exited before all machines had joined", "look at the output there"
        ) from None


def log_ranks(here: int, names: Sequence[str], ranks: range) -> None:
    # Only machine 0 shows progress.
    if len(names) > 1:
        run = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        place = "" if here == 0 else f"; progress is shown on {names[0]}"
        Report().say(f"{names[here]} of {len(names)} runs {run}{place}")


def supervise(run: SupervisedRun) -> Termination | None:
    """Wait until all ranks of all machines have finished, or return why the run ends early."""
    ranks, peers, warned = run.ranks, run.peers, False
    while True:
        ranks.receive()
        peers.phase, peers.lost_contact = ranks.phase, ranks.lost_contact
        if termination := find_termination(run):
            return termination
        for paused in run.stalls.find_paused():
            limit = f"the run ends when that lasts {run.stalls.stall_seconds:g} s (stall_timeout)"
            Report().warn(str(paused), f"`kill -CONT {paused.pid}` lets it go on; {limit}")
        if not ranks.alive:
            # machine 0 serves the store, so a machine that is done keeps sending heartbeats until all are
            peers.state = "finished"
            if peers.others_are("finished", "left"):
                return None
        if peers.messages.rejected_key and not warned:
            warned = True
            Report().warn(f"ignored an invalid message in the store of this run, under `{peers.messages.rejected_key}`")
        time.sleep(POLL_SECONDS)


def find_termination(run: SupervisedRun) -> Termination | None:
    """Reason to end the run now, published for all machines; None while all is well."""
    ranks, peers, here = run.ranks, run.peers, run.peers.here
    if run.stop.signal_number:
        return peers.terminate(launcher_signaled(here, run.stop.signal_number))
    if peers.termination:
        return peers.termination
    if failure := ranks.first_failure():
        ranks.receive()  # the reason that it sent just before it exited
        # No launcher was asked to stop, so the ranks of one that died may have stopped all others with them.
        if failure.code in SIGNAL_CODES and (silent := peers.first_silent_since(time.monotonic())):
            return peers.terminate(silent)
        return peers.terminate(rank_failed(here, failure).with_reason(ranks.reason))
    if ranks.reason and time.monotonic() - ranks.failed_at > EXIT_SECONDS:
        return peers.terminate(rank_hangs_after_failing(here, ranks.reason))
    if stall := run.stalls.find(peers.phase_elsewhere):
        return peers.terminate(rank_stalled(here, stall))
    if silent := peers.find_silent():
        return peers.terminate(silent)
    return None


def shut_down(run: SupervisedRun, termination: Termination) -> None:
    """Signal the ranks to exit, with time to save after a signal from outside, and kill those that do not."""
    ranks, peers = run.ranks, run.peers
    if termination.signal_number and termination.machine != peers.here:
        Report().say(f"{peers.names[termination.machine]} was asked to stop; the ranks here save and stop with it")
    ranks.send_signal(termination.signal_number or signal.SIGTERM)
    # a rank that waits in a collective for one that failed can neither save nor exit by itself
    end = time.monotonic() + exit_seconds(termination)
    while ranks.alive and time.monotonic() < end and not peers.find_silent():
        ranks.receive()
        if stall := run.stalls.find(peers.phase_elsewhere):
            if termination.signal_number:
                Report().warn(f"{stall}; stopping without saving")
            break
        time.sleep(POLL_SECONDS)
    ranks.kill()
    ranks.receive()
    peers.lost_contact = True  # a machine that is still there sends heartbeats, also while it saves


def exit_seconds(termination: Termination) -> float:
    if termination.signal_number:
        return SAVE_ON_SIGNAL_SECONDS
    return DEAD_PEER_EXIT_SECONDS if termination.killed else EXIT_SECONDS


def exit_with_reason(termination: Termination, run: SupervisedRun) -> NoReturn:
    """Exit with the exit code of the run, and print why unless a rank of this machine has."""
    here = run.peers.here
    if (termination.said and termination.machine == here) or termination.is_explained_by(run.ranks.reason):
        raise SystemExit(termination.exit_code)
    raise termination.error(here, run.peers.names)
