"""The file of the queue, shared by all pages of this user here, and the GPUs that its runs take."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter, ValidationError

from simpletuner.errors import SettingsError
from simpletuner.launch.plan import GPUS, ranks_per_machine, visible_gpus
from simpletuner.runs.folder import RunFolder
from simpletuner.runs.settings_record import SETTINGS, read_settings
from simpletuner.settings import Loaded
from simpletuner.settings.declared.sections import Launch
from simpletuner.system.files.atomic import write_json
from simpletuner.system.files.cache_files import user_home
from simpletuner.system.files.locks import exclusive_lock
from simpletuner.system.files.regular_files import MALFORMED, latest_set_aside, read_file, set_aside
from simpletuner.system.numbers import count_noun

DEVICES = Path("/dev")
# The device of runs without GPUs: each takes all cores, so there is one at a time.
CPU = "the CPU"


@dataclass(frozen=True)
class Need:
    """Devices that a run takes of this machine: those it is bound to, else any `count` GPUs."""

    count: int = 1
    bound: tuple[str, ...] = ()

    def __str__(self) -> str:
        if CPU in self.bound:
            return CPU
        return f"GPU {', '.join(self.bound)}" if self.bound else count_noun(self.count, "GPU")

    def wanted(self, devices: Collection[str]) -> list[str]:
        """Return those of the devices that the run could take."""
        return [each for each in devices if (each in self.bound if self.bound else each != CPU)]

    def choose(self, free: Collection[str]) -> tuple[str, ...]:
        """Return the devices that the run gets; none where too few are free."""
        wanted = self.wanted(free)
        return tuple(wanted[: self.count]) if len(wanted) >= self.count else ()


def list_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that processes with this environment have, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := environment.get(GPUS)) is not None:
        return tuple(part for each in visible.split(",") if (part := each.strip()) not in ("", "-1"))
    # By their number alone: a container that is given the fourth GPU has nvidia3, which CUDA counts as 0.
    return tuple(str(number) for number, _ in enumerate(DEVICES.glob("nvidia[0-9]*")))


def need_of(launch: Launch, environment: Mapping[str, str]) -> Need:
    """Raises SettingsError for gpu_ids that no run can have."""
    if launch.use_cpu or not list_gpus(environment):
        return Need(1, (CPU,))
    count = ranks_per_machine(launch)
    bound = visible_gpus(launch, environment).get(GPUS, "")
    return Need(count, tuple(bound.split(",")[:count]) if bound else ())


def need_of_start(loaded: Loaded) -> Need:
    """Return the need of a run that the page would start now. Raises as `need_of` does."""
    environment = {**loaded.variables, **os.environ}  # as `train` passes on what an .env file has
    need = need_of(loaded.settings.launch, environment)
    if need.bound or GPUS in os.environ or GPUS not in loaded.variables:
        return need
    return replace(need, bound=list_gpus(environment)[: need.count])


def devices_of(run: RunFolder, pid: int) -> tuple[str, ...]:
    """Devices of a running run, whoever has started it: by its settings and its process's environment."""
    try:
        environment = psutil.Process(pid).environ()
    except (psutil.Error, OSError):  # another user's
        environment = dict(os.environ)
    devices = (CPU, *list_gpus(environment))
    try:
        return need_of(launch_of(run), environment).choose(devices) or devices
    except SettingsError:
        return devices


def launch_of(run: RunFolder) -> Launch:
    recorded = (read_settings(path) if (path := run.file(SETTINGS)) is not None else None) or {}
    names = ("num_processes", "num_machines", "gpu_ids", "use_cpu")
    try:
        return Launch.model_validate({name: recorded[name] for name in names if name in recorded})
    except ValidationError:
        return Launch()


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
    """Sentence of the failure."""
    hint: str = ""
    is_queued: bool = True
    """False for a run that was started at once, which is here for its devices alone."""
    pid: int = 0
    created: float = 0.0
    """Start of the process, since a pid may be another's by now."""
    devices: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    added: float = field(default_factory=time.time)
    others: dict[str, Any] = field(default_factory=dict, compare=False)
    """Values that only a newer version knows, by name, which stay in the file."""

    @property
    def is_started(self) -> bool:
        return self.state in (EntryState.STARTING, EntryState.RUNNING)

    @property
    def is_alive(self) -> bool:
        """True while the process started for this entry runs."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@cache
def adapter() -> TypeAdapter[list[QueueEntry]]:
    return TypeAdapter(list[QueueEntry])


def with_others(row: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of an entry, with all other names in `others`."""
    return {**row, "others": {name: value for name, value in row.items() if name not in QueueEntry.__annotations__}}


def as_row(entry: QueueEntry) -> dict[str, object]:
    row = asdict(entry)
    return {**row.pop("others"), **row}


@dataclass(frozen=True)
class QueueFile:
    path: Path

    @classmethod
    def of_machine(cls) -> QueueFile:
        # A home folder may be shared by machines, each of which has GPUs of its own.
        return cls(user_home() / "queue" / f"{socket.gethostname()}.json")

    def read(self) -> list[QueueEntry]:
        """Entries; none where there is no file, or one that cannot be read, which `edited` moves aside."""
        return self._parsed() or []

    def _parsed(self) -> list[QueueEntry] | None:
        """Return the entries; None for what is damaged, of another version, or no file."""
        try:
            rows = json.loads(read_file(self.path))
            return adapter().validate_python([with_others(row) for row in rows])
        except FileNotFoundError:
            return []
        except (OSError, *MALFORMED):
            return None

    @contextmanager
    def edited(self) -> Iterator[list[QueueEntry]]:
        """Yield the entries to change; they are written at the end, and nobody else changes them meanwhile.

        What cannot be read is moved aside first: runs that wait in a file of a newer version would be lost.
        """
        with exclusive_lock(self.path.with_suffix(".lock")):
            entries = self._parsed()
            if entries is None:
                set_aside(self.path, lambda _: None)  # the page shows `warning` for as long as it is there
            entries = entries or []
            before = list(entries)
            yield entries
            if entries != before:
                write_json(self.path, [as_row(each) for each in entries])

    def warning(self) -> str:
        """Return a warning with the place of entries that could not be read; empty if there are none."""
        if aside := latest_set_aside(self.path):
            return f"a queue that could not be read is set aside as {aside}; remove it once nothing in it is missed"
        if self._parsed() is None:
            return f"{self.path} cannot be read, or is of another version: it is set aside at the next change"
        return ""

    def lock_of_place(self, place: str) -> Path:
        return self.path.with_name(f"{self.path.stem}-{place}.lock")
