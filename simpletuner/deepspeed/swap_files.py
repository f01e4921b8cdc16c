"""Folders for DeepSpeed's offloading to NVMe, each with its creator, who may be dead.

Each process creates its own folder under `offload_param_path`, with a file `owner.json` about itself, which
it keeps locked. The kernel releases the lock when the process ends, however it ends. Locks always
work within one machine, but not over every shared file system, so only the machine that created a folder may
judge it dead. (Heartbeats would need synchronized clocks, and a process that is suspended for long would look
dead.)
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
from simpletuner.system.files.cache_files import entries_of, is_plain_file, is_plain_folder
from simpletuner.system.files.lease_record import boot_id
from simpletuner.system.files.locks import is_locked, lock_file

SWAP_PREFIX, OWNER_FILE = "simpletuner-swap-", "owner.json"

SwapState = Literal["live", "dead", "elsewhere", "foreign"]
"""`elsewhere`: of another machine, so it cannot be judged here. `foreign`: no run of ours created it."""


@dataclass(frozen=True)
class SwapOwner:
    """The process that created a folder; `boot` is the running kernel's, the same in all its containers."""

    host: str
    boot: str
    pid: int
    output_dir: str

    @property
    def is_this_machine(self) -> bool:
        return self.host == socket.gethostname() or (bool(self.boot) and self.boot == boot_id())

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, output_dir {self.output_dir}"


@contextmanager
def create_swap_folder(parent: Path, output_dir: Path) -> Iterator[Path]:
    """Create this process's own folder, and remove it on exit.

    What a killed process leaves behind is removed by the next start (`remove_dead_swap_folders`) or by
    `cache clear deepspeed`. Raises EnvironmentNotReady where the folder cannot be created or locked.
    """
    folder = parent / f"{SWAP_PREFIX}{uuid.uuid4().hex[:12]}"
    owner = SwapOwner(socket.gethostname(), boot_id(), os.getpid(), str(output_dir.absolute()))
    try:
        folder.mkdir(parents=True)
        # Locked first, written then: whoever reads an owner that is not locked knows that it is dead.
        descriptor = lock_file(folder / OWNER_FILE, exclusive=True, needed=False)
        os.write(descriptor, json.dumps(asdict(owner)).encode())
    except OSError as error:
        hint = "set offload_param_path to a folder on this machine's own NVMe"
        raise EnvironmentNotReady(f"cannot offload to {folder}: {error.strerror}", hint) from None
    try:
        yield folder
    finally:
        with suppress(OSError):  # `cache clear deepspeed` can remove it later
            remove_swap_folder(folder)
        os.close(descriptor)


def remove_dead_swap_folders(parent: Path) -> list[SwapOwner]:
    """Remove the folders of this machine's dead processes, and return their owners."""
    owners = [(folder, owner) for folder in entries_of(parent) if (owner := read_owner(folder)) is not None]
    dead = [(folder, owner) for folder, owner in owners if find_state(folder, owner) == "dead"]
    for folder, _ in dead:
        with suppress(OSError):  # belongs to another user; `cache clear deepspeed` reports it
            remove_swap_folder(folder)
    return [owner for _, owner in dead]


def read_owner(folder: Path) -> SwapOwner | None:
    """Read the owner of a swap folder; None if the folder is not one of ours."""
    if not (folder.name.startswith(SWAP_PREFIX) and is_plain_folder(folder) and is_plain_file(folder / OWNER_FILE)):
        return None
    try:
        value: Any = json.loads((folder / OWNER_FILE).read_text(encoding="utf-8"))
        return SwapOwner(**value) if isinstance(value, Mapping) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def find_state(folder: Path, owner: SwapOwner | None) -> SwapState:
    if owner is None:
        return "foreign"
    held = is_locked(folder / OWNER_FILE)
    if held:
        return "live"
    return "dead" if owner.is_this_machine and held is False else "elsewhere"


def remove_swap_folder(folder: Path) -> None:
    # The owner's file goes last: after an interrupted removal the folder is still known as ours.
    remove_contents(folder, keep=OWNER_FILE)
    (folder / OWNER_FILE).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.rmdir()


def remove_contents(folder: Path, keep: str = "") -> None:
    """Remove everything in a folder but one name; links are removed, not followed."""
    for path in entries_of(folder):
        if path.name == keep:
            continue
        if not is_plain_folder(path):
            path.unlink(missing_ok=True)
            continue
        remove_contents(path)
        with suppress(FileNotFoundError):
            path.rmdir()
