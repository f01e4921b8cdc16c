"""How long the ranks of a machine may live on after one of them was killed: real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext

from patience import PATIENCE
from torch.distributed import HashStore

from simpletuner.launch.heartbeat import PeerMonitor
from simpletuner.launch.ranks import Ranks
from simpletuner.launch.stall_detection import StallDetector
from simpletuner.launch.store import MessageStore, TorchStore, message_signer
from simpletuner.launch.supervisor import EXIT_SECONDS, SupervisedRun, shut_down, supervise
from simpletuner.system.processes.signals import StopRequest

DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as good as a rank inside of a collective
print("deaf", flush=True)
time.sleep(1000)
"""


def test_survivors_of_a_killed_rank_are_not_given_the_time_of_one_that_reports_why_it_failed(capfd):
    ranks, messages = Ranks(os.environ), MessageStore(TorchStore(HashStore()), message_signer(None, {}))
    with (
        PeerMonitor(messages, 0, ["machine 0 (a)"], 30) as peers,
        ranks.started([sys.executable, "-c", DEAF], {0: {}, 1: {}}),
    ):
        said, end = "", time.monotonic() + PATIENCE
        while said.count("deaf") < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
            said += capfd.readouterr().out
        ranks.processes[1].send_signal(signal.SIGKILL)
        run = SupervisedRun(ranks, peers, StopRequest(), StallDetector(ranks, 50))
        termination, began = supervise(run), time.monotonic()
        assert termination is not None and termination.killed
        shut_down(run, termination)
        took = time.monotonic() - began
        assert ranks.processes[0].poll() == -signal.SIGKILL
        peers.leave(0)
    assert took < EXIT_SECONDS - 5


def test_a_stop_that_no_launcher_was_asked_for_comes_from_one_that_died():
    """Ranks of a dead launcher stop, and all others with them: 143 and "stopped by SIGTERM" would be of nobody."""
    store, names = HashStore(), ["machine 0 (a)", "machine 1 (b)"]
    messages = MessageStore(TorchStore(store), message_signer(None, {}))
    for is_alive in (False, True):
        ranks = Ranks(os.environ)
        with (
            PeerMonitor(messages, 0, names, 1000, suspect_seconds=30 if is_alive else 0.5) as peers,
            PeerMonitor(messages, 1, names, 1000) if is_alive else nullcontext(),
            ranks.started([sys.executable, "-c", "raise SystemExit(143)"], {0: {}}),
        ):
            termination = supervise(SupervisedRun(ranks, peers, StopRequest(), StallDetector(ranks, 50)))
            assert termination is not None
            if is_alive:
                assert (termination.exit_code, termination.sentence) == (143, f"{ranks.first_failure()}")
            else:
                assert termination.exit_code == 5
                assert termination.sentence.startswith("machine 1 (b) has been silent for ")
                peers.leave(1000)  # returns although that machine never leaves
        store = HashStore()
        messages = MessageStore(TorchStore(store), message_signer(None, {}))
