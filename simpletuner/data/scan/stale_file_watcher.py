"""Look for files that were rewritten since they were scanned, in a separate process, while the run trains.

`python -m simpletuner.data.scan.stale_file_watcher` is that process: ten million files take it a minute, in
which the interpreter's lock of a rank would be busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from simpletuner.data.images.frame_folders import is_frame_folder
from simpletuner.data.scan.captions import caption_file
from simpletuner.data.scan.file_list import local_folder_version
from simpletuner.data.scan.scan import open_table
from simpletuner.data.storage.storage import stored_file
from simpletuner.report import Report
from simpletuner.system.processes.python_process import module_command

MODULE = "simpletuner.data.scan.stale_file_watcher"


class FileCheck:
    """A running check; `found` is given how many files have changed, and the first one, if there is any."""

    def __init__(self, scan: Path, folder: Path, with_captions: bool, found: Callable[[int, str], None]) -> None:
        command = module_command(MODULE, str(scan), str(folder), str(int(with_captions)), str(os.getpid()))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._found = found
        self._thread = threading.Thread(target=self._wait, name="file check", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.process.kill()
        self._thread.join()

    def _wait(self) -> None:
        with self.process:
            assert self.process.stdout
            said = self.process.stdout.read()
        if said and (result := json.loads(said))["changed"]:
            self._found(result["changed"], result["first"])


def check_files(scan: Path, folder: Path, with_captions: bool, parent: int) -> dict[str, object]:
    """Compare the files of a kept scan with its versions of them; end where the run that asked has ended."""
    changed, first = 0, ""
    table, _ = open_table(scan)
    for batch in table.select(["name", "version", "caption_version"]).to_batches():
        if os.getppid() != parent:
            sys.exit()
        for name, version, caption_version in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            is_same = version_of(folder, name) == version
            if is_same and with_captions:
                is_same = version_of_caption(f"{folder}/{caption_file(name)}") == caption_version
            if not is_same:
                changed, first = changed + 1, first or name
    return {"changed": changed, "first": first}


def version_of(folder: Path, name: str) -> str:
    if is_frame_folder(name):
        with suppress(OSError):
            return local_folder_version(folder, name)
    return stored_file(name, partial(os.stat, f"{folder}/{name}")).version


def version_of_caption(path: str) -> str:
    found = stored_file(path, partial(os.stat, path))
    return found.version + found.problem if found.version or os.path.lexists(path) else ""


if __name__ == "__main__":
    # The lowest priority: nothing waits for it, and ranks need the cores.
    os.nice(19)
    scan, folder, with_captions, parent = sys.argv[1:]
    Report().json(check_files(Path(scan), Path(folder), with_captions == "1", int(parent)))
