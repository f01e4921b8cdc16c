"""Sentences for ranks that cannot reach others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore

from simpletuner.errors import EnvironmentNotReady, Stopped, TrainingError
from simpletuner.launch.launcher_connection import LauncherConnection
from simpletuner.parallel import world
from simpletuner.parallel.lost_ranks import find_ended, find_lost, record_process
from simpletuner.parallel.world import World, joined_world, lost_a_peer, report_first_failure
from simpletuner.system.files.lease_record import boot_id, pid_namespace, process_start
from simpletuner.system.processes.run_status import Activity
from simpletuner.system.processes.signals import StopRequest

HOST = socket.gethostname()


def store_of(*processes: str) -> HashStore:
    """Return the store of a run whose rank 0 is this process."""
    store = HashStore()
    record_process(store, 0)
    for rank, process in enumerate(processes, start=1):
        store.set(f"process/{rank}", process)
    return store


def test_the_rank_that_is_gone_is_named():
    with subprocess.Popen(["true"]) as ended:
        pass
    here = f"{HOST} {os.getpid()}"
    store = store_of(here, f"{HOST} {ended.pid}")
    found = find_lost(store, 0, 3, 1000, None)
    assert found == f"rank 2 (pid {ended.pid} on {HOST}), which has ended", "at once: this machine knows"
    assert find_lost(store, 0, 3, 0.3, lambda: False) == found, "a launcher would have told within that"
    assert find_lost(store, 0, 3, 1000, lambda: True) == ""
    elsewhere = store_of(here, "node7 5", "node8 6")
    elsewhere.set("lost/1", "1")
    elsewhere.set("lost/3", "1")
    assert find_lost(elsewhere, 0, 4, 0.3, None) == "rank 2 (pid 5 on node7), without an answer"
    many = store_of(*[f"node{number} 1" for number in range(1, 12)])
    assert find_lost(many, 0, 12, 0.3, None).endswith("rank 8 (pid 1 on node8) and 3 more, without an answer")


def test_who_waits_for_a_rank_whose_process_ends_is_not_left_waiting(monkeypatch):
    monkeypatch.setattr(world, "LOOK_SECONDS", 0.1)
    store = HashStore()
    record_process(store, 0)
    with subprocess.Popen(["sleep", "1000"]) as other:
        start = process_start(other.pid)
        store.set("start/1", f"{boot_id()} {pid_namespace()} {other.pid} {start}")
        store.set("start/2", f"another-machine {pid_namespace()} {other.pid} 1")
        assert find_ended(store, range(4)) == [], "what runs, what another machine has, and who has not joined yet"
        other.kill()
    waiting = World(0, 4, 0, torch.device("cpu"), store)
    with pytest.raises(DistNetworkError, match="rank 1 has ended") as caught:
        waiting.wait_for_count("job", 1, lambda: None)
    assert lost_a_peer(caught.value)


def test_a_rank_that_was_asked_to_stop_like_the_one_that_it_lost_has_stopped(monkeypatch):
    with subprocess.Popen(["true"]) as ended:
        pass
    rank, stop = World(0, 2, 0, torch.device("cpu"), store_of(f"{HOST} {ended.pid}")), StopRequest()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    lost, alone = DistNetworkError("Connection closed by peer"), LauncherConnection(None, Activity(), stop, 0)
    named = rf"lost contact to rank 1 \(pid {ended.pid}"
    with pytest.raises(TrainingError, match=named), report_first_failure(rank, stop, alone):
        raise lost
    stop.receive(signal.SIGTERM)
    named = "stopped by SIGTERM like other ranks"
    with pytest.raises(Stopped, match=named) as caught, report_first_failure(rank, stop, alone):
        raise lost
    assert caught.value.exit_code == 143


def test_a_rank_that_cannot_join_says_why_in_words_of_ours(monkeypatch):
    monkeypatch.setattr(world, "JOIN_SECONDS", 1)

    def why(rank: int, address: str, port: int) -> str:
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(EnvironmentNotReady) as caught, joined_world(given, use_cpu=True):
            pass
        return caught.value.message

    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        assert why(0, "127.0.0.1", port).endswith(f"port {port} of this machine, where they meet, is in use")
    assert why(1, "127.0.0.1", port).endswith(f"127.0.0.1:{port} cannot be reached (connection refused)")
    assert f"no-such-host:{port} cannot be reached (" in why(1, "no-such-host", port)
    assert why(0, "127.0.0.1", port).endswith(f"not all came to 127.0.0.1:{port} within 1 s")
