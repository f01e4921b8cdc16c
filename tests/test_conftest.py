from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, begun_with_long
from patience import PATIENCE


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_each_worker_begins_with_its_share_of_the_long_tests_file_by_file(workers):
    tests: list[Any] = [
        SimpleNamespace(nodeid=f"test_{n // 20}.py::{n}", path=n // 20, is_long=n % 100 < 3) for n in range(1000)
    ]
    ordered = list(begun_with_long(tests, workers, lambda test: test.is_long))
    assert sorted(map(id, ordered)) == sorted(map(id, tests))
    left, files = list(ordered), []
    for number in range(workers):
        size = len(left) // (workers - number)  # as xdist's WorkStealingScheduling.check_schedule sends them
        part, left = left[:size], left[size:]
        count = sum(test.is_long for test in part)
        assert all(test.is_long for test in part[:count])
        files.append({test.path for test in part[:count]})
    assert sum(map(len, files)) == 10 and max(map(len, files)) - min(map(len, files)) <= 1


WORKER = """
import multiprocessing, os, sys
from pathlib import Path
from shared_fork_server import share_fork_server

def told(sender):
    sender.send(os.getppid())

if __name__ == "__main__":
    share_fork_server(Path(sys.argv[1]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    for _ in sys.stdin:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=told, args=(sender,))
        process.start()
        process.join()
        print(process.exitcode, receiver.recv(), flush=True)
"""


def test_workers_share_a_fork_server_which_outlives_the_one_that_started_it(tmp_path: Path):
    program = tmp_path / "worker.py"
    program.write_text(WORKER)

    def worker() -> Any:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        places = {"PYTHONPATH": str(ROOT / "tests" / "support")}
        return subprocess.Popen([sys.executable, str(program), str(tmp_path)], env=os.environ | places, **pipes)

    def forks(started: Any) -> str:
        started.stdin.write("\n")
        started.stdin.flush()
        return started.stdout.readline()

    def ended(started: Any) -> int:
        started.stdin.close()
        return started.wait(PATIENCE)

    first, second, third = worker(), worker(), worker()
    server = forks(first)
    assert server.startswith("0 ") and forks(second) == server
    assert ended(first) == 0 and forks(second) == server
    assert ended(second) == 0
    assert forks(third).startswith("0 ") and forks(third) != server
    assert ended(third) == 0
    for each in (first, second, third):
        each.stdout.close()
