"""Processes that hold a folder or a bucket as runs on other machines do, whose mounts lock for themselves.

`python lease_holders.py PLACE MACHINE SECONDS LATE LOG`: takes the place, then writes lines to LOG as long as it holds
it, a check before each; says on its output what it does. Each line is `time machine token`, by CLOCK_MONOTONIC.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from simpletuner.errors import SimpleTunerError
from simpletuner.system.files.lease import Lease, Place
from simpletuner.system.files.lease_folder import FolderPlace
from simpletuner.system.files.lease_record import Record
from simpletuner.system.files.locks import lock_file
from simpletuner.system.files.mounts import FileSystem, file_system_at

LIFE_SECONDS = 100.0


class ForeignMount(FolderPlace):
    """A folder as one of several machines sees it, each of which has its own table of locks."""

    def __init__(self, folder: Path, machine: str, late_seconds: float) -> None:
        super().__init__(folder, system=FileSystem("sshfs", late_seconds=late_seconds))
        self.own_lock = folder / f"locks-of-{machine}"

    def lock(self, exclusive: bool) -> bool | None:
        try:
            self.descriptor = lock_file(self.own_lock, exclusive)
        except BlockingIOError:
            return True
        return False


def of_machine(machine: str, seconds: float) -> Record:
    """Return a record whose process is this one, on another machine of the same name."""
    return replace(Record.of_this_process(), boot=f"boot of {machine}", seconds=seconds)


def place_at(address: str, machine: str, late_seconds: float) -> Place:
    """Return a bucket, a mount as it is, or a folder of a disk in which each machine locks for itself."""
    if "://" in address:
        from simpletuner.data.config.places import mirror_place
        from simpletuner.data.storage.object_storage import open_bucket
        from simpletuner.training.mirroring.bucket_records import BucketRecords

        return BucketRecords(open_bucket(mirror_place(address)))
    folder = Path(address)
    system = file_system_at(folder)
    if system.is_local:
        return ForeignMount(folder, machine, late_seconds)
    return FolderPlace(folder, system=replace(system, late_seconds=late_seconds))


class ForeignHolder(subprocess.Popen[str]):
    """A process that holds a place, or waits for it."""

    def __init__(
        self, place: Path | str, machine: str, seconds: float = 0.1, late: float = 0.2, log: Path | None = None
    ) -> None:
        arguments = [str(place), machine, str(seconds), str(late), str(log or Path(place, "log"))]
        command = [sys.executable, __file__, *arguments]
        super().__init__(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline().strip()


def main(address: str, machine: str, seconds: float, late: float, log: Path) -> None:
    lease = Lease(of_machine(machine, seconds))
    try:
        lease.acquire(place_at(address, machine, late), say=lambda text: print(f"says {text}", flush=True))
        print(f"held {lease.record.token}", flush=True)
        end, number = time.monotonic() + LIFE_SECONDS, 0
        while time.monotonic() < end:
            lease.check()
            with log.open("a") as file:
                file.write(f"{time.monotonic()} {machine} {lease.record.token}\n")
            time.sleep(0.01)
            if number == 0:
                print("wrote", flush=True)
            number += 1
    except (SimpleTunerError, OSError) as error:
        hint = getattr(error, "hint", "")
        print(f"{type(error).__name__}: {error} / {hint}", flush=True)
        sys.exit(getattr(error, "exit_code", 3))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
