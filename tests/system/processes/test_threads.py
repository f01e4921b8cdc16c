from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from simpletuner.system.processes.threads import in_daemon, map_in_daemons


def test_results_come_in_order_and_an_error_with_them():
    started = threading.Barrier(3)

    def work(number: int) -> int:
        if number < 3:
            started.wait(60)  # three threads at once
        return number * 2

    assert map_in_daemons(work, range(20), 3)() == [number * 2 for number in range(20)]
    assert map_in_daemons(work, [], 3)() == []
    with pytest.raises(ZeroDivisionError):
        map_in_daemons(lambda number: 1 // number, [1, 0, 2], 2)()


def test_a_process_that_ends_does_not_wait_for_daemons():
    code = (
        "import time; from simpletuner.system.processes import threads; threads.in_daemon(lambda: time.sleep(99), '')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert in_daemon(lambda: 1, "one").result() == 1
