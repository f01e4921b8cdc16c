"""How much memory a rank takes for each step that it has made: thousands of steps of a tiny SDXL on one core.

    python benchmarks/growth.py [STEPS]

By quarter of the run: anonymous memory at its end (RssAnon), and the least that malloc had given out within it
(mallinfo2), to which what is kept for good adds. The difference is the allocator's own: free blocks between others in
use. Plain, then with a checkpoint each 100 steps, EMA and images each 500.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from diffusers_script import make_inputs
from interleaved import print_table

STEPS, QUARTERS = 10_000, 4
KINDS = {
    "plain": ("--checkpoint_step_interval=1000000",),
    "checkpoints, EMA, images": (
        *("--checkpoint_step_interval=100", "--checkpoints_total_limit=3", "--use_ema"),
        *("--validation_step_interval=500", "--validation_prompt=a red square"),
    ),
}
# glibc's struct mallinfo2: ten sizes, of which the eighth is what is in use, in all arenas.
NUMBERS, IN_USE = 10, 7


class MallocInfo(ctypes.Structure):
    _fields_ = [(f"number_{index}", ctypes.c_size_t) for index in range(NUMBERS)]


def write_readings(file: Path, output: Path) -> None:
    """Write the step, KiB of anonymous memory and KiB in use of this process each second."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = MallocInfo
    while True:
        time.sleep(1)
        with contextlib.suppress(OSError, ValueError), file.open("a") as lines:  # the run has not begun
            said = json.loads((output / "status.json").read_text())
            status = Path("/proc/self/status").read_text().splitlines()
            anonymous = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
            if said["doing"] == "training":  # not the export, after the last step
                in_use = getattr(libc.mallinfo2(), f"number_{IN_USE}")
                lines.write(f"{said['step']} {anonymous} {in_use / 1024:.0f}\n")


def train(file: str, *arguments: str) -> None:
    """Train in this process, with a thread that reads its memory into `file`."""
    from simpletuner.app import main as simpletuner

    output = next(each.partition("=")[2] for each in arguments if each.startswith("--output_dir="))
    threading.Thread(target=write_readings, args=(Path(file), Path(output)), daemon=True).start()
    sys.argv = ["simpletuner", "train", *arguments]
    simpletuner()


def readings(folder: Path, steps: int, flags: tuple[str, ...]) -> Iterator[tuple[int, int, int]]:
    arguments = ["--use_cpu", "--model_family=sdxl", "--mixed_precision=no", "--resolution=64", "--train_batch_size=1"]
    arguments += [f"--pretrained_model_name_or_path={folder / 'model'}", f"--instance_data_dir={folder / 'images'}"]
    arguments += [f"--max_train_steps={steps}", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    (file := folder / "readings").write_text("")
    with tempfile.TemporaryDirectory(dir=folder) as output, (folder / "log").open("w") as log:
        command = [sys.executable, __file__, "train", str(file), *arguments, f"--output_dir={output}"]
        ended = subprocess.run(command, env=environment, stdout=log, stderr=log)
    assert ended.returncode == 0, (folder / "log").read_text()
    for line in file.read_text().splitlines():
        step, anonymous, in_use = map(int, line.split())
        yield step, anonymous, in_use


def main(steps: int = STEPS) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        make_inputs(folder := Path(name))
        for kind, flags in KINDS.items():
            found = list(readings(folder, steps, flags))
            for quarter in range(QUARTERS):
                low, high = (max(1, steps * each // QUARTERS) for each in (quarter, quarter + 1))
                within = [each for each in found if low <= each[0] < high]
                if within:
                    in_use = min(each[2] for each in within)
                    rows.append([kind, f"{low:,} to {high:,}", f"{within[-1][1] / 1024:,.1f}", f"{in_use / 1024:,.1f}"])
    columns = ["tiny SDXL", "steps", "MiB at the end", "least in use"]
    print_table(f"anonymous memory of a rank in {steps:,} steps, and malloc's part in use", columns, rows)


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1:2] == ["train"] else main(*map(int, sys.argv[1:]))
