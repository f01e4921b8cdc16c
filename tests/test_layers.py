"""Imports point one way: the contracts of import-linter in pyproject.toml hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_import_points_up():
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0 and "0 broken" in done.stdout, done.stdout
