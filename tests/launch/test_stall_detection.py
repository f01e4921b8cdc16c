"""Which of some real processes are found to hang: not those that work for long, nor those that wait for others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from patience import PATIENCE

from simpletuner.launch.ranks import Ranks
from simpletuner.launch.stall_detection import PAUSE_SECONDS, ProgressMeter, StallDetector

RANK = """
import os, subprocess, sys, threading, time
from simpletuner.system.processes.run_status import Activity
from simpletuner.launch.launcher_connection import connect_to_launcher
from simpletuner.system.processes.signals import handle_stop_signals

def compute():
    while True:
        pass

def compute_in_a_child():
    subprocess.run([sys.executable, "-c", "while True: pass"])

def write():
    with open("written", "wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
            time.sleep(0.2)

def save():
    activity.begin("saving", watched=False)  # which may wait for a slow disk
    time.sleep(1000)

def wait_for_others():
    activity.advance()
    activity.advance()
    time.sleep(1000)

def hang():
    time.sleep(1000)

activity = Activity()
with handle_stop_signals() as stop, connect_to_launcher(os.environ, activity, stop, 60):
    activity.begin("work")
    globals()[sys.argv[1 + int(os.environ['RANK'])]]()
"""


def found(ranks: Ranks, seconds: float, stall_seconds: float = 1.5, hangs: bool = True) -> set[tuple[int, str]]:
    """Return the ranks that are found to hang within some seconds, or later if one `hangs`, with their states."""
    detector, stalls, end = StallDetector(ranks, stall_seconds), set(), time.monotonic() + seconds
    while time.monotonic() < end or (hangs and not stalls and time.monotonic() < end + PATIENCE):
        ranks.receive()
        if stall := detector.find():
            stalls.add((stall.rank, stall.state))
            assert f"rank {stall.rank} (pid {stall.pid}) has made no progress for " in str(stall)
        time.sleep(0.1)
    return stalls


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_rank_may_be_slow_to_begin_unless_it_is_stopped_which_is_said_early(tmp_path):
    """No heartbeat, no CPU, no disk: so it looks where packages are imported from a network drive."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    ranks = Ranks(os.environ)
    with ranks.started(command, {rank: {"RANK": str(rank)} for rank in range(2)}):
        detector = StallDetector(ranks, 1.5)
        assert found(ranks, 4, hangs=False) == set() and list(detector.find_paused()) == []
        ranks.processes[1].send_signal(signal.SIGSTOP)
        end = time.monotonic() + PATIENCE
        while not (paused := list(detector.find_paused())):
            assert time.monotonic() < end
        assert [(stall.rank, stall.state) for stall in paused] == [(1, "stopped")]
        assert "before it began: the process is stopped (SIGSTOP)" in str(paused[0])
        assert list(detector.find_paused()) == [], "it is said once"
        assert found(ranks, 4) == {(1, "stopped")}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_hangs_is_told_from_what_works_and_what_waits(tmp_path, monkeypatch):
    command = [sys.executable, "-c", RANK, "compute", "compute_in_a_child", "write", "wait_for_others", "hang", "save"]
    ranks = Ranks(os.environ)
    monkeypatch.chdir(tmp_path)
    with ranks.started(command, {rank: {"RANK": str(rank)} for rank in range(6)}):
        end = time.monotonic() + PATIENCE
        while ranks.phase < 3 or any(status.phase < 1 + (rank == 5) for rank, status in ranks.statuses.items()):
            ranks.receive()
            assert time.monotonic() < end
            time.sleep(0.1)
        children = psutil.Process(ranks.processes[1].pid).children()
        assert found(ranks, 3) == {(4, "sleeping")}
        ranks.processes[4].kill()
        began = time.monotonic()
        for rank in (0, 2):
            ranks.sockets[rank].close()  # as when the launcher dies
        ranks.processes[3].send_signal(signal.SIGSTOP)  # the one that is ahead
        assert found(ranks, 4) == {(3, "stopped")}
        assert [ranks.processes[rank].wait(PATIENCE) for rank in (0, 2)] == [143, 143]
        assert time.monotonic() - began < 40, "there was nothing to save: else they would leave after 60 s"
    for child in children:
        child.kill()


def test_ranks_are_not_blamed_for_the_time_in_which_their_launcher_was_stopped_itself():
    """Ctrl-Z stops all of them, and after `fg` none has made progress since."""
    meter = ProgressMeter()
    for seconds, is_paused in ((PAUSE_SECONDS - 2, False), (PAUSE_SECONDS + 2, True)):
        meter.idle_seconds(os.getpid(), 1)
        meter.active, meter.asked = (each - seconds for each in (meter.active, meter.asked))
        idle = meter.idle_seconds(os.getpid(), 1)
        assert (idle == 0) if is_paused else (idle >= seconds)


POLLING = """
import time
print("polling", flush=True)
while True:
    until = time.perf_counter() + 0.0005  # of a second, 20 times in one: 1 % of a core
    while time.perf_counter() < until:
        pass
    time.sleep(0.05)
"""


def test_a_process_that_only_polls_makes_no_progress():
    with subprocess.Popen([sys.executable, "-c", POLLING], stdout=subprocess.PIPE) as polling:
        assert polling.stdout is not None and polling.stdout.readline()  # its start takes CPU
        meter, end = ProgressMeter(sample_seconds=1.0), time.monotonic() + 6
        meter.idle_seconds(polling.pid, 1)
        while time.monotonic() < end:
            idle = meter.idle_seconds(polling.pid, 1)
            time.sleep(0.1)
        polling.kill()
    assert idle > 4
