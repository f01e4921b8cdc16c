"""One fork server for all workers of pytest: what it imports takes 5 CPU seconds."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import TextIO


class SharedForkServer(forkserver.ForkServer):
    """A fork server that the first worker to need it starts, and the others join."""

    folder: Path
    """Where workers find the server: its socket, and the descriptor that keeps it alive."""
    has_joined = False

    def ensure_running(self) -> None:
        if self.has_joined:
            return
        if self._forkserver_pid is not None:
            super().ensure_running()
            return
        with (self.folder / "fork-server.txt").open("a+") as state:
            fcntl.flock(state, fcntl.LOCK_EX)
            state.seek(0)
            self.has_joined = self.joined(state.read())
            if not self.has_joined:
                self.start(state)

    def joined(self, said: str) -> bool:
        """Join the server that a worker has written down; False if there is none, or if that worker has ended."""
        alive, _, socket = said.partition(" ")
        with suppress(FileNotFoundError):
            # The server ends once nobody has this end of a pipe open: it outlives the worker that has started it.
            self._forkserver_alive_fd = os.open(alive, os.O_WRONLY)
            self._forkserver_address = socket
        return self._forkserver_alive_fd is not None

    def start(self, state: TextIO) -> None:
        super().ensure_running()
        socket = self.folder / f"fork-server-{os.getpid()}"
        os.link(self._forkserver_address, socket)  # the other name goes with the worker
        state.truncate(0)
        state.write(f"/proc/{os.getpid()}/fd/{self._forkserver_alive_fd} {socket}")


def share_fork_server(folder: Path) -> None:
    """Have this process share the fork server of all that name the same folder."""
    server = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    server.__class__ = SharedForkServer
    server.folder = folder
