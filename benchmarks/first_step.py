"""Files and functions of simpletuner that run before the first step: one plain rank of the tiny SDXL, caches warm.

A place to look, not a limit: each file is one that a reader of a start walks through.

    python benchmarks/first_step.py [--list]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from interleaved import print_table

import simpletuner
from simpletuner.app import main as command_line

PACKAGE = Path(simpletuner.__file__).parent
SHOWN = 4
EXAMPLES = Path(__file__).parents[1] / "examples"


class Traced:
    """Code of the package that was called before `Trainer.train_step`."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str, int]] = set()
        self.is_over = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or self.is_over or not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_name == "<module>":  # an import runs no function of the start
            return
        self.is_over = code.co_name == "train_step"
        self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))


def run(folder: Path, steps: int) -> None:
    """Train for some steps in this process."""
    flags = ["--model_family=sdxl", "--model_flavour=tiny", f"--instance_data_dir={folder / 'images'}"]
    flags += ["--resolution=64", "--aspect_bucket_alignment=16", f"--max_train_steps={steps}", "--mixed_precision=no"]
    try:
        command_line(["train", "--use_cpu", f"--output_dir={folder / 'run'}", *flags])
    except SystemExit as ended:
        assert ended.code in (0, None), ended.code


def main() -> None:
    """Print the counts, and with --list each file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true", help="also print the functions of each file")
    arguments = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES / "shapes"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, EXAMPLES / "shapes" / "draw.py", folder / "images", "--count=36"], check=True)
        run(folder, 1)
        traced = Traced()
        threading.setprofile(traced.profile)
        sys.setprofile(traced.profile)
        run(folder, 2)
        sys.setprofile(None)
        threading.setprofile(None)
    files = Counter(file for file, _, _ in traced.functions)
    rows = [["files", str(len(files))], ["functions", str(len(traced.functions))]]
    print_table("before the first step", ["", "count"], rows)
    if arguments.list:
        for file in sorted(files):
            names = sorted({name for place, name, _ in traced.functions if place == file})
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            print(f"{Path(file).relative_to(PACKAGE)}: {', '.join(names[:SHOWN])}{more}")


if __name__ == "__main__":
    main()
