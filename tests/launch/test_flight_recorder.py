"""The last collectives of ranks, in the folder of a run that hung: real sockets, real files."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from simpletuner.launch.launcher_connection import LauncherConnection
from simpletuner.launch.ranks import DUMP_SECONDS, SILENT_SECONDS, Ranks
from simpletuner.launch.stall_detection import dumps_at, prefix_in, record_into, where_dumps_are, write_records
from simpletuner.system.processes.run_status import Activity
from simpletuner.system.processes.signals import StopRequest


def test_what_the_user_has_set_stays(tmp_path):
    environment: dict[str, str] = {}
    record_into(tmp_path, environment)
    assert environment == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight_recorder_rank_",
    }
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/local/trace_"}
    environment = dict(own)
    record_into(tmp_path, environment)
    assert environment == own | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert prefix_in(tmp_path, environment) == Path("/local/trace_")


def test_only_dumps_of_this_start_are_named(tmp_path):
    prefix = prefix_in(tmp_path, {})
    for rank in (0, 1):
        (tmp_path / f"flight_recorder_rank_{rank}").write_bytes(b"of an earlier start")
    before = dumps_at(prefix)
    assert len(before) == 2 and where_dumps_are(prefix, before) == ""
    for rank in (1, 2, 10):
        (tmp_path / f"flight_recorder_rank_{rank}").write_bytes(b"new")
    os.utime(tmp_path / "flight_recorder_rank_1", (1, 1))
    said = where_dumps_are(prefix, before)
    assert said.startswith(
        f"the last collectives of ranks 1, 2, 10 are in {prefix}*: `torchfrtrace {tmp_path} --prefix "
    )
    write_records(prefix, 3)
    assert not (tmp_path / "flight_recorder_rank_3").exists(), "before the ranks have joined there are none"


def test_a_rank_that_is_asked_writes_and_answers():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.settimeout(10)
        rank, written = LauncherConnection(theirs, Activity(), StopRequest(), 50), []
        rank.dump = lambda: written.append(time.monotonic())
        rank.thread.start()
        assert "status" in json.loads(ours.recv(1 << 16)) and not written
        ours.send(b"d")
        while "dumped" not in (message := json.loads(ours.recv(1 << 16))):
            assert "status" in message
        assert len(written) == 1
        ours.recv(1 << 16)
        rank.closed.set()
        rank.thread.join()
        assert len(written) == 1, "once per request"


def test_a_rank_that_never_answers_is_waited_for_only_while_it_sends_heartbeats():
    ranks = Ranks(os.environ)
    with ranks.started([sys.executable, "-c", "import time; time.sleep(1000)"], {0: {}}):
        began = time.monotonic()
        ranks.request_dumps()
        assert DUMP_SECONDS <= time.monotonic() - began < DUMP_SECONDS + 5
        assert began - ranks.statuses[0].received < SILENT_SECONDS
        time.sleep(max(0.0, ranks.statuses[0].received + SILENT_SECONDS - time.monotonic()))
        began = time.monotonic()
        ranks.request_dumps()
        assert time.monotonic() - began < DUMP_SECONDS
