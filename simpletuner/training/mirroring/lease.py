"""The lease of a folder in a bucket: an object that the run which writes there renews, so that no two of them do."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from simpletuner.errors import EnvironmentNotReady, SimpleTunerError
from simpletuner.system.files.locks import is_running_here

if TYPE_CHECKING:
    from simpletuner.data.storage.object_storage import ObjectStorage

LEASE = ".lease.json"
RENEW_SECONDS = 10.0
DEAD_SECONDS = 30.0
"""After which a holder that has not renewed it is dead. Watched, not computed: clocks of machines differ."""
SURELY_DEAD_SECONDS = 600.0
"""Age by two clocks from which a lease is not watched: a machine that starts the next day need not wait."""
MAX_BYTES = 1 << 16


class LeaseLost(EnvironmentNotReady):
    """Another run writes to the folder."""


class Lease:
    """The right to write to a folder in a bucket, held by one run at a time."""

    def __init__(self, storage: ObjectStorage, say: Callable[[str], None]) -> None:
        self.storage, self.say = storage, say
        self.id, self.count, self.is_held = secrets.token_hex(8), 0, False
        self.closing = threading.Event()
        self.lost: dict[str, Any] | None = None

    def acquire(self, stop: Callable[[], None] = lambda: None) -> None:
        """Take the lease, or that of a holder that is dead; `stop` may raise to end waiting for an earlier one.

        Raises LeaseLost where another run holds it.
        """
        if self.is_held:
            return
        holder = self._read()
        if holder and not self._is_dead(holder):
            self._wait_for(holder, stop)
        self._write()
        self.is_held = True
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raise LeaseLost where another run has taken the lease meanwhile."""
        holder = self.lost or self._read()
        if holder and holder.get("id") != self.id:
            self.lost = holder
            raise self._error(holder, "has taken over")

    def release(self) -> None:
        """Give the lease back; where the bucket does not answer, it dies by itself."""
        self.closing.set()
        with suppress(SimpleTunerError):
            if self.is_held and self._read().get("id") == self.id:
                self.storage.remove([LEASE])
        self.is_held = False

    def _wait_for(self, holder: dict[str, Any], stop: Callable[[], None]) -> None:
        self.say(
            f"waiting up to {DEAD_SECONDS:.0f} s for an earlier run{described(holder)} that may write to "
            f"{self.storage.describe()}"
        )
        end = time.monotonic() + DEAD_SECONDS
        while time.monotonic() < end:
            stop()
            time.sleep(0.5)
            now = self._read()
            if not now:
                return
            if now != holder:
                raise self._error(now, "writes to")

    def _is_dead(self, holder: dict[str, Any]) -> bool:
        host, pid = holder.get("host"), holder.get("pid")
        if host == socket.gethostname() and not is_running_here(f"{host} {pid}"):
            return True
        with suppress(FileNotFoundError):
            return self.storage.age_seconds(LEASE) > SURELY_DEAD_SECONDS
        return True

    def _renew(self) -> None:
        while not self.closing.wait(RENEW_SECONDS) and self.lost is None:
            with suppress(SimpleTunerError):  # a bucket that is down now may answer the next time
                self.check()
                self._write()

    def _write(self) -> None:
        self.count += 1
        values = {"id": self.id, "host": socket.gethostname(), "pid": os.getpid(), "renewed": self.count}
        self.storage.write(LEASE, json.dumps(values).encode())

    def _read(self) -> dict[str, Any]:
        """Return who holds the lease; nothing where no one does."""
        with suppress(FileNotFoundError, ValueError, RecursionError):
            value = json.loads(self.storage.read(LEASE, MAX_BYTES))
            return value if isinstance(value, dict) else {}
        return {}

    def _error(self, holder: dict[str, Any], does: str) -> LeaseLost:
        return LeaseLost(
            f"another run{described(holder)} {does} {self.storage.describe()}",
            "wait for it, or give this one another mirror_output",
        )


def described(holder: dict[str, Any]) -> str:
    """Return ` (pid 12 on host)`."""
    return f" (pid {holder.get('pid')} on {holder.get('host')})"
