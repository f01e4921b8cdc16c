"""A rank's connection to its launcher: heartbeats, why the rank failed, and what to do when the launcher
dies.

It is a socket pair within this machine rather than the store: nobody on the network can reach it, no other
traffic delays it, and it breaks the moment the launcher dies.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress

from simpletuner.errors import SimpleTunerError
from simpletuner.launch.plan import SOCKET_VARIABLE
from simpletuner.launch.stall_detection import ProgressMeter
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.processes.run_status import Activity
from simpletuner.system.processes.signals import StopRequest

HEARTBEAT_SECONDS = 1.0
# Longest time that sending may block when the launcher is stopped, as by Ctrl-Z.
SEND_SECONDS = 2.0
# Longest time until a rank without a launcher exits when it has nothing to save, or once it has.
ORPHAN_SECONDS = 8.0
# Seconds for the last save of a rank without a launcher.
SAVE_SECONDS = 900.0


class LauncherConnection:
    """Sends a heartbeat every second from a thread; no-op for a rank without our launcher (None)."""

    def __init__(
        self, connection: socket.socket | None, activity: Activity, stop: StopRequest, stall_seconds: float
    ) -> None:
        self.connection, self.activity, self.stop, self.stall_seconds = connection, activity, stop, stall_seconds
        self.closed, self.is_gone = threading.Event(), False
        self.dump: Callable[[], None] = lambda: None
        """Called when the launcher asks for this rank's last collectives, before ending a hanging run."""
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def send(self, **message: object) -> None:
        """Send the launcher, if any, a message: `reason` of a failure, or `lost_contact` to a rank."""
        with suppress(OSError):
            if self.connection is not None:
                self.connection.send(json.dumps(message).encode())

    def send_reason(self, error: SimpleTunerError) -> None:
        """Send why this rank fails, for the launchers of all machines to print."""
        self.send(reason={"exit_code": int(error.exit_code), "message": error.message, "hint": error.hint})

    def _run(self) -> None:
        while not self.closed.is_set():
            now = self.activity
            names = ("phase", "doing", "unsaved", "watched", "save_seconds")
            status = {name: getattr(now, name) for name in names}
            if self._is_broken(json.dumps({"status": status}).encode()):
                self._exit_without_launcher()
                return
            # woken early when `unsaved` changes, so that the launcher confirms Ctrl-C correctly
            now.changed.wait(HEARTBEAT_SECONDS)
            now.changed.clear()
            if self._is_asked():
                with suppress(OSError):  # a full disk
                    self.dump()
                self.send(dumped=True)

    def _is_asked(self) -> bool:
        """True if the launcher has sent something: only ever a request for a dump."""
        assert self.connection is not None
        poll = select.poll()
        try:
            poll.register(self.connection, select.POLLIN)
        except ValueError:  # closed meanwhile: the run has ended
            return False
        return any(events & select.POLLIN for _, events in poll.poll(0)) and bool(self.connection.recv(1))

    def _is_broken(self, message: bytes) -> bool:
        """Send a message; return whether the launcher is gone."""
        assert self.connection is not None
        try:
            self.connection.send(message)
        except TimeoutError:  # the launcher is stopped, not dead
            return False
        except OSError:
            return not self.closed.is_set()
        return False

    def _exit_without_launcher(self) -> None:
        """Ask the main thread to stop, and exit the process if it hangs or takes too long."""
        self.is_gone = True
        # The kernel closes the launcher's sockets before it sends the SIGTERM of terminate_with_parent, which
        # must not be taken for a second signal. One that came before keeps its number, which is the exit
        # code.
        self.stop.announce()
        self.stop.may_exit = True
        meter, began = ProgressMeter(), time.monotonic()
        saved = began
        while not self.closed.wait(HEARTBEAT_SECONDS / 4):
            idle = meter.idle_seconds(os.getpid(), self.activity.phase)
            waited = time.monotonic() - began
            if self.activity.unsaved:
                saved = time.monotonic()
            nothing_to_save = time.monotonic() - saved > ORPHAN_SECONDS
            hangs = self.activity.unsaved and self.activity.watched and idle > self.stall_seconds
            if nothing_to_save or hangs or waited > SAVE_SECONDS:
                self.stop.before_exit("stopped without saving, since its launcher has died")
                os._exit(128 + self.stop.signal_number)


@contextmanager
def connect_to_launcher(
    environment: MutableMapping[str, str], activity: Activity, stop: StopRequest, stall_seconds: float
) -> Iterator[LauncherConnection]:
    """Send heartbeats to the launcher whose socket is in the environment; without one, to nobody."""
    descriptor = environment.pop(SOCKET_VARIABLE, "")  # not for child processes of this rank
    if not descriptor:
        yield LauncherConnection(None, activity, stop, stall_seconds)
        return
    # A child that inherits the socket would keep it open after this rank has died.
    os.set_inheritable(int(descriptor), False)
    stop.may_exit, stop.unsaved = False, None  # the launcher confirms Ctrl-C, and kills on the second one
    with socket.socket(fileno=int(descriptor)) as connection:
        connection.settimeout(SEND_SECONDS)
        launcher = LauncherConnection(connection, activity, stop, stall_seconds)
        launcher.thread.start()
        try:
            yield launcher
        finally:
            # Not joined: it may be in a send that blocks for SEND_SECONDS, and exits with the process.
            launcher.closed.set()


def exit_if_launcher_died(environment: Mapping[str, str]) -> None:
    """Exit if the launcher died before the kernel was asked to signal its death."""
    if descriptor := environment.get(SOCKET_VARIABLE):
        try:
            os.write(int(descriptor), b"{}")
        except OSError:
            raise SystemExit(128 + signal.SIGTERM) from None


def check_of_machine(launch: Launch, environment: Mapping[str, str]) -> str:
    # Where a launcher of ours runs, it makes the check.
    return launch.preemption_check if environment.get("LOCAL_RANK", "0") == "0" else ""
