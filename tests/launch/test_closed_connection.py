from __future__ import annotations

import socket

from simpletuner.launch.launcher_connection import LauncherConnection
from simpletuner.system.processes.activity import Activity
from simpletuner.system.processes.signals import StopRequest


def test_a_rank_that_has_ended_asks_nothing_of_a_closed_connection():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours:
        launcher = LauncherConnection(theirs, Activity(), StopRequest(), 60.0)
        ours.send(b"d")
        assert launcher._is_asked() and not launcher._is_asked()
        theirs.close()
        assert not launcher._is_asked()  # the heartbeat printed a traceback
