"""Folders for what DeepSpeed offloads to NVMe: which are ours, and whether the run that made one is alive.

Each process makes a folder of its own under `offload_param_path`, with a file that names its owner and that the owner
holds locked. A lock always reaches over one machine, but not over every shared file system; so a folder of another
machine counts as dead for nobody but that machine. (A heartbeat would need clocks that agree, and a process that is
stopped for long would look dead.)
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.cache_files import entries_of, is_plain_file, is_plain_folder
from simpletuner.system.locks import is_held, locked

PREFIX, OWNER = "simpletuner-swap-", "owner.json"

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

State = Literal["live", "dead", "elsewhere", "foreign"]


@dataclass(frozen=True)
class Owner:
    """The process that made a folder; `boot` is the same for all containers of one machine that is up."""

    host: str
    boot: str
    pid: int
    output_dir: str

    @property
    def is_here(self) -> bool:
        """Return whether that was on this machine, so that its lock can be relied on."""
        return self.host == socket.gethostname() or (bool(self.boot) and self.boot == boot_id())

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, output_dir {self.output_dir}"


def boot_id() -> str:
    """Return the kernel's name for the time since this machine was started; empty where it has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


@contextmanager
def claimed(parent: Path, output_dir: Path) -> Iterator[Path]:
    """Yield a new folder for what this process swaps out, and remove it in the end.

    A process that is killed leaves it behind unlocked: the next start (`clear_dead`) or `cache clear deepspeed` removes
    it then. Raises EnvironmentFault where it cannot be made or locked.
    """
    folder = parent / f"{PREFIX}{uuid.uuid4().hex[:12]}"
    owner = Owner(socket.gethostname(), boot_id(), os.getpid(), str(output_dir.absolute()))
    try:
        folder.mkdir(parents=True)
        descriptor = locked(folder / OWNER, exclusive=True)
        os.write(descriptor, json.dumps(asdict(owner)).encode())  # after the lock: an owner who can be read held it
    except OSError as error:
        hint = "set offload_param_path to a folder on this machine's own NVMe"
        raise EnvironmentNotReady(f"cannot offload to {folder}: {error.strerror}", hint) from None
    try:
        yield folder
    finally:
        with suppress(OSError):  # then `cache clear deepspeed` can do it
            remove(folder)
        os.close(descriptor)


def clear_dead(parent: Path) -> list[Owner]:
    """Remove what this machine's dead processes left in an offload folder, and return who they were."""
    owners = [(folder, owner) for folder in entries_of(parent) if (owner := owner_of(folder)) is not None]
    dead = [(folder, owner) for folder, owner in owners if state_of(folder, owner) == "dead"]
    for folder, _ in dead:
        with suppress(OSError):  # it is somebody else's; `cache clear deepspeed` says so
            remove(folder)
    return [owner for _, owner in dead]


def owner_of(folder: Path) -> Owner | None:
    """Return who made a folder; None if it is not one of ours."""
    if not (folder.name.startswith(PREFIX) and is_plain_folder(folder) and is_plain_file(folder / OWNER)):
        return None
    try:
        value: Any = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return Owner(**value) if isinstance(value, Mapping) else None
    except (OSError, ValueError, TypeError):
        return None


def state_of(folder: Path, owner: Owner | None) -> State:
    """Return whether a folder's run is alive, dead, not to be judged from this machine, or none of ours."""
    if owner is None:
        return "foreign"
    held = is_held(folder / OWNER)
    if held:
        return "live"
    return "dead" if owner.is_here and held is False else "elsewhere"


def remove(folder: Path) -> None:
    """Remove a swap folder; the owner's file goes last, so that an interrupted removal can be repeated."""
    remove_below(folder, keep=OWNER)
    (folder / OWNER).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.rmdir()


def remove_below(folder: Path, keep: str = "") -> None:
    """Remove all that lies in a folder but one file; links themselves, not what they lead to."""
    for path in entries_of(folder):
        if path.name == keep:
            continue
        if not is_plain_folder(path):
            path.unlink(missing_ok=True)
            continue
        remove_below(path)
        with suppress(FileNotFoundError):
            path.rmdir()
