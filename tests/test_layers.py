"""Imports point one way: the contracts of import-linter in pyproject.toml hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_import_points_up():
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0 and "0 broken" in done.stdout, done.stdout


def test_what_reads_the_folder_of_a_run_or_files_of_others_needs_neither_torch_nor_a_server():
    package = Path(__file__).parents[1] / "simpletuner"
    names = [
        f"simpletuner.{name}.{file.stem}" for name in ("runs", "importing") for file in (package / name).glob("*.py")
    ]
    assert len(names) > 20
    script = (
        f"import sys, {', '.join(names)}; print(sorted({{'torch', 'diffusers', 'starlette'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
