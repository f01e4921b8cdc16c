"""How long the ranks of a machine may live on after one of them was killed: real processes."""

from __future__ import annotations

import os
import signal
import sys
import time

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
