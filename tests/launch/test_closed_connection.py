from __future__ import annotations

import signal
import socket
import time
from typing import NoReturn

from patience import PATIENCE

from simpletuner.launch.launcher_connection import LauncherConnection
from simpletuner.system.processes.run_status import Activity
from simpletuner.system.processes.signals import StopRequest


def test_a_rank_that_has_ended_asks_nothing_of_a_closed_connection():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours:
        launcher = LauncherConnection(theirs, Activity(), StopRequest(), 60.0)
        ours.send(b"d")
        assert launcher._is_asked() and not launcher._is_asked()
        theirs.close()
        assert not launcher._is_asked()  # the heartbeat printed a traceback


class NeverExits(StopRequest):
    def exit_now(self, number: int) -> NoReturn:
        raise AssertionError(f"signal {number} was taken for a second one")


def test_the_signal_that_follows_a_dead_launcher_does_not_end_the_saving():
    """The socket of a killed launcher breaks before SIGTERM reaches its ranks: a heartbeat in between lost the step."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    activity, request, end = Activity(), NeverExits(), time.monotonic() + PATIENCE
    activity.unsaved, request.may_exit = 23, False
    with theirs:
        launcher = LauncherConnection(theirs, activity, request, 60.0)
        ours.close()
        launcher.thread.start()
        while not request.may_exit:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert request.signal_number == signal.SIGTERM and launcher.is_gone
        request.receive(signal.SIGTERM)
        launcher.closed.set()
        launcher.thread.join()
