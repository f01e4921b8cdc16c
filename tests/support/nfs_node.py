"""One node of an nfs check, as a real process, started or forked: `python nfs_node.py '{"path": ..., "rank": 0}'`.

Beyond what a node is asked, it can be given another user, a wrong clock, locks as some mounts have them, or an end in
the midst of the check. Prints its outcome as JSON.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from simpletuner.system.processes.signals import handle_stop_signals
from simpletuner.tools.nfs import visibility
from simpletuner.tools.nfs.check import check
from simpletuner.tools.nfs.rendezvous import Node


def only_here(descriptor: int, operation: int) -> None:
    """Lock as `nolock` and `localflock` do: nobody else learns of it."""


def unknown(descriptor: int, operation: int) -> None:
    """Lock as Lustre without `flock` does."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def taken(descriptor: int, operation: int) -> None:
    """Lock as when another process holds it for ever."""
    if operation != fcntl.LOCK_UN:
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))


def deadly(descriptor: int, operation: int) -> None:
    """End as when a machine is lost."""
    os.kill(os.getpid(), signal.SIGKILL)


LOCKS = {"": fcntl.flock, "only here": only_here, "unknown": unknown, "taken": taken, "deadly": deadly}


def main(wish: dict[str, Any]) -> None:
    """Check as one node."""
    ahead, locks, user = wish.pop("clock_ahead", 0.0), wish.pop("locks", ""), wish.pop("user", None)
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    visibility.LATE_SECONDS = wish.pop("late_seconds", visibility.LATE_SECONDS)
    paths = {name: Path(wish.pop(name)) for name in ("path", "mountinfo") if name in wish}
    node = Node(**paths, **wish, clock=lambda: time.time() + ahead, flock=LOCKS[locks])
    with handle_stop_signals() as stop:
        outcome = check(node, stop, lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(outcome.as_json()))


def forked(wish: dict[str, Any], out: str, err: str) -> None:
    """Check as one node in a forked process, which writes into files."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.chdir("/")
    main(wish)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
