"""Run parts one after the other until the time is over, each in a process of its own with a limit of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpu.parts import Part, all_parts
from gpu.records import Record, read_records

GRACE_SECONDS = 4
"""Time in which a part that is ended says how far its runs are."""
SLOWER = 10
"""Limits of tiny models on a CPU that others use, beside those on a GPU."""
WHOLE = "whole"


@dataclass
class Driver:
    """`results` gets a record on each line; `log` what parts print besides, and their errors."""

    results: Path
    log: Path
    tiny: bool

    def drive(self, seconds: float, names: Collection[str], done: Sequence[Path]) -> None:
        """Run the parts of these names, or all of them, but those that a file of `done` holds whole."""
        end, memory = time.monotonic() + seconds, gpu_gib()
        whole = {record["part"] for record in read_records(done) if record.get("ended") == WHOLE}
        for name, part in all_parts().items():
            if name in whole or (names and name not in names):
                continue
            left = end - time.monotonic()
            if memory and not self.tiny and not part.needs_gib <= memory < part.replaced_from_gib:
                self.write(name, ended=f"not on this card: {memory:.0f} GiB")
            elif left < part.expects / 2:
                self.write(name, ended=f"not begun: {left:.0f} s are left")
            else:
                self.run(name, part, left)

    def run(self, name: str, part: Part, left: float) -> None:
        limit, began = min(left, part.limit * (SLOWER if self.tiny else 1)), time.monotonic()
        print(f"== {name} (at most {limit:.0f} s)", flush=True)
        command = [sys.executable, str(Path(__file__).parent), "part", name, *(["--tiny"] if self.tiny else [])]
        with self.log.open("ab") as log:
            log.write(f"\n==== {name}\n".encode())
            log.flush()
            start = log.tell()
            # Threads of a tiny model wait for each other where others use the CPU: a step took 4 s instead of 0.1.
            own = os.environ | ({"OMP_NUM_THREADS": "1"} if self.tiny else {})
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=own)
            try:
                ended = self.follow(name, process, limit, log)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        said = {} if ended == WHOLE else {"said": self.log.read_bytes()[start:].decode(errors="replace")[-1500:]}
        self.write(name, ended=ended, seconds=round(time.monotonic() - began, 1), **said)

    def follow(self, name: str, process: subprocess.Popen[bytes], limit: float, log: BinaryIO) -> str:
        """Write what a part tells until it ends, or is ended at its limit; return how it ended."""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        rest, end, is_asked = b"", time.monotonic() + limit, False
        while True:
            code = process.poll()  # before the last read: what was told is complete where it has ended
            *lines, rest = (rest + (process.stdout.read() or b"")).split(b"\n")
            for line in lines:
                self.keep(name, line, log)
            if is_asked and (code is not None or time.monotonic() > end + GRACE_SECONDS):
                return f"ended after {limit:.0f} s"
            if code is not None:
                return f"exit code {code}" if code else WHOLE
            if not is_asked and time.monotonic() > end:
                process.terminate()
                is_asked = True
            time.sleep(0.05)

    def keep(self, name: str, line: bytes, log: BinaryIO) -> None:
        """Write a line of stdout to the results, or to the log where it is no record."""
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            self.write(name, **found)
        elif line:
            log.write(line + b"\n")
            log.flush()

    def write(self, name: str, **found: object) -> None:
        record: Record = {"part": name, **found}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record)[:400], flush=True)


def gpu_gib() -> float:
    """Return the memory of the first GPU, by nvidia-smi: this process makes no CUDA context; 0 without a GPU."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()[0]) / 1024
    except (ValueError, IndexError, subprocess.TimeoutExpired):
        return 0
