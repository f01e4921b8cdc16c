"""The file of the queue: one for all pages of this user on this machine, whose GPUs they share."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from simpletuner.page.queue.gpus import Need
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.locks import exclusive_lock
from simpletuner.system.files.regular_files import read_file


class EntryState(StrEnum):
    """State of an entry; one whose run has reached its output folder and ended is no longer there."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed to start"


@dataclass(frozen=True)
class QueueEntry:
    """A run that waits, or that a page has started: it has its devices until its process ends."""

    file: str
    """Absolute path of the configuration."""
    output: str
    place: str
    """The folders of the page that has added it; no other page shows or starts it."""
    need: Need
    checkpoint: str = ""
    state: EntryState = EntryState.WAITING
    sentence: str = ""
    """Of the failure."""
    hint: str = ""
    is_queued: bool = True
    """False for a run that was started at once, which is here for its devices alone."""
    pid: int = 0
    created: float = 0.0
    """Start of the process, since a pid may be another's by now."""
    devices: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    added: float = field(default_factory=time.time)

    @property
    def is_started(self) -> bool:
        return self.state in (EntryState.STARTING, EntryState.RUNNING)

    @property
    def is_alive(self) -> bool:
        """Return whether the process that was started for it has not ended."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@cache
def adapter() -> TypeAdapter[list[QueueEntry]]:
    return TypeAdapter(list[QueueEntry])


@dataclass(frozen=True)
class QueueFile:
    """The entries on disk, in their order."""

    path: Path

    @classmethod
    def of_machine(cls) -> QueueFile:
        # A home folder may be shared by machines, each of which has GPUs of its own.
        return cls(user_home() / "queue" / f"{socket.gethostname()}.json")

    def read(self) -> list[QueueEntry]:
        """Return the entries; none where the file is missing or damaged. Raises OSError where it cannot be read."""
        try:
            return adapter().validate_json(read_file(self.path))
        except (FileNotFoundError, ValidationError):
            return []

    @contextmanager
    def edited(self) -> Iterator[list[QueueEntry]]:
        """Yield the entries to change; they are written at the end, and nobody else changes them meanwhile."""
        with exclusive_lock(self.path.with_suffix(".lock")):
            entries = self.read()
            before = list(entries)
            yield entries
            if entries != before:
                write_json(self.path, [asdict(each) for each in entries])

    def lock_of_place(self, place: str) -> Path:
        """Return the file that the page holds locked which starts what was added for these folders."""
        return self.path.with_name(f"{self.path.stem}-{place}.lock")
