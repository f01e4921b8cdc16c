"""Record of the holder of a folder or a bucket, written and renewed by the holder.

Host name, pid, clock and file times say nothing about another machine: containers share names, and clocks are
minutes apart. They are valid on the record's own machine, which is recognized by the kernel's random boot id.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from simpletuner.errors import EnvironmentNotReady

VERSION = 1
# Size of a record, one sector: always overwritten whole, so no reader finds it cut short.
RECORD_BYTES = 512
BEAT_SECONDS = 10.0
"""Between two renewals of a record."""
MISSED_BEATS = 3


class LeaseLost(EnvironmentNotReady):
    """Another run holds the folder."""


def boot_id() -> str:
    # The same in all containers on this boot.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    # The same pid is another process in each container of a machine.
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Start time of a process in clock ticks since boot, unaffected by clock changes; empty if dead.

    See /proc/PID/stat in proc(5). A zombie is dead.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in (b"Z", b"X") else rest[18].decode()


def launcher_pid() -> int:
    # A rank's parent is the launcher.
    return os.getppid() if "RANK" in os.environ else os.getpid()


@dataclass(frozen=True)
class Record:
    """A holder. `pid` is the process to signal, `process` the one that renews, which began at `ticks`;
    `token` grows by one with each holder, `beat` with each renewal."""

    id: str = ""
    token: int = 0
    host: str = ""
    pid: int = 0
    boot: str = ""
    namespace: str = ""
    process: int = 0
    ticks: str = ""
    since: str = ""
    """Start of holding by the holder's clock, for display."""
    beat: int = 0
    seconds: float = BEAT_SECONDS
    """Between two beats."""
    released: bool = False
    shared: bool = False
    """True for one of several users of a cache, which all renew one record: it says nothing of the others."""
    version: int = VERSION
    damaged: str = field(default="", compare=False)
    """Fault of an unreadable record, which counts as held."""

    @staticmethod
    def of_this_process() -> Record:
        since, process = datetime.now(UTC).isoformat(timespec="seconds"), os.getpid()
        boot, namespace, ticks = boot_id(), pid_namespace(), process_start(process)
        return Record("", 0, socket.gethostname(), launcher_pid(), boot, namespace, process, ticks, since)

    @property
    def is_of_earlier_version(self) -> bool:
        # Earlier versions wrote only the name of the process that locked the file.
        return not self.id and not self.damaged

    @property
    def is_on_this_machine(self) -> bool:
        """True if the pid can be looked up here."""
        return bool(self.boot and self.namespace) and (self.boot, self.namespace) == (boot_id(), pid_namespace())

    @property
    def is_of_living_process(self) -> bool:
        return process_start(self.process) == self.ticks != ""

    @property
    def is_here(self) -> bool:
        """True if the pid is of this machine; for records of earlier versions, by host name."""
        return self.is_on_this_machine if self.boot else self.host == socket.gethostname()

    @property
    def is_launcher_alive(self) -> bool:
        """True if the process to signal is alive on this machine."""
        if not self.is_here or self.pid <= 1:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it is another user's
            return True
        return True

    def describe(self) -> str:
        """Return ` (pid 12 on host)`; empty if it does not name a process."""
        return f" (pid {self.pid} on {self.host})" if self.host and self.host.isprintable() and self.pid else ""

    def encode(self) -> bytes:
        values = asdict(replace(self, host=self.host[:64]))
        del values["damaged"]
        return json.dumps(values, ensure_ascii=True).encode().ljust(RECORD_BYTES - 1) + b"\n"

    def renewed(self) -> Record:
        return replace(self, beat=self.beat + 1)


def parse_record(content: bytes, path: str) -> Record | None:
    """Parse a record; None for an empty file. An unreadable one has `damaged`, a sentence."""
    if not content.strip(b"\0 \n"):
        return None
    with suppress(ValueError, RecursionError):
        host, pid = content.decode().split()
        if pid.isascii() and pid.isdecimal() and len(pid) < 10:
            return Record(host=host, pid=int(pid))
    with suppress(ValueError, RecursionError, TypeError):
        if isinstance(values := json.loads(content), dict):
            return from_values(values, path)
    return Record(damaged=f"{path} is damaged: who holds it cannot be read")


def from_values(values: dict[str, Any], path: str) -> Record:
    """Raises TypeError, ValueError for what is no record."""
    version = values.get("version", VERSION)
    if type(version) is int and version > VERSION:
        return Record(damaged=f"{path} is of a newer simpletuner (version {version} of its records)")
    if "renewed" in values:  # of a bucket, by an earlier version
        values = {**values, "beat": values["renewed"]}
    known = {each.name: each.default for each in fields(Record) if each.name in values and each.name != "damaged"}
    for name, default in known.items():
        if not isinstance(values[name], (int, float) if isinstance(default, float) else type(default)):
            raise TypeError(name)
    record = Record(**{name: values[name] for name in known})
    if not record.id or not 0 < record.seconds < 1e6 or min(record.token, record.pid, record.process) < 0:
        raise ValueError("no record")
    return record
