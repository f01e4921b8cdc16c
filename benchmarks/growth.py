"""How much memory a rank takes for each step that it has made: thousands of steps of a tiny SDXL on one core.

    python benchmarks/growth.py [STEPS]

Anonymous memory (RssAnon), where a leak is. A line through what is read each second after 4,500 steps, in which
buffers and caches fill, and the report's 4,096 points of each metric. Plain, then with a checkpoint each 100 steps, EMA
and images each 500.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from diffusers_script import make_inputs
from interleaved import print_table

STEPS, FILLED = 8000, 4500
KINDS = {
    "plain": ("--checkpoint_step_interval=1000000",),
    "checkpoints, EMA, images": (
        *("--checkpoint_step_interval=100", "--checkpoints_total_limit=3", "--use_ema"),
        *("--validation_step_interval=500", "--validation_prompt=a red square"),
    ),
}


def readings(folder: Path, steps: int, flags: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Train, and yield the step and the KiB of anonymous memory each second."""
    command = [sys.executable, "-m", "simpletuner", "train", "--use_cpu", "--model_family=sdxl", "--mixed_precision=no"]
    command += [f"--pretrained_model_name_or_path={folder / 'model'}", f"--instance_data_dir={folder / 'images'}"]
    command += ["--resolution=64", "--train_batch_size=1", f"--max_train_steps={steps}", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(dir=folder) as output, (folder / "log").open("w") as log:
        run = subprocess.Popen([*command, f"--output_dir={output}"], env=environment, stdout=log, stderr=log)
        while run.poll() is None:
            time.sleep(1)
            try:
                step = json.loads((Path(output) / "status.json").read_text())["step"]
                status = Path(f"/proc/{run.pid}/status").read_text()
            except (OSError, ValueError):  # not begun, or just over
                continue
            yield step, next((int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")), 0)
    assert run.returncode == 0, (folder / "log").read_text()


def main(steps: int = STEPS) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        make_inputs(folder := Path(name))
        for kind, flags in KINDS.items():
            found = np.array(
                [each for each in readings(folder, steps, flags) if min(FILLED, steps // 2) <= each[0] < steps]
            )
            slope = np.polyfit(found[:, 0], found[:, 1], 1)[0]
            rows.append([kind, f"{found[0, 1] / 1024:,.0f}", f"{found[-1, 1] / 1024:,.0f}", f"{slope:.2f}"])
    columns = ["tiny SDXL", f"MiB at {min(FILLED, steps // 2):,}", "MiB at the end", "KiB per step"]
    print_table(f"anonymous memory of a rank in {steps:,} steps", columns, rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
