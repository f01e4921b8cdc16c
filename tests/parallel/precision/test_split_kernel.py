"""The kernel of state_layout=split without a GPU: run by Triton's interpreter, and compiled for architectures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT
from patience import PATIENCE

TRITON = ROOT / ".triton"


@pytest.fixture
def ask(tmp_path):
    if not TRITON.exists():
        assert "CI" not in os.environ, "make .triton"
        pytest.skip("Triton is not installed (`make .triton`)")

    def run(what: str, **variables: str) -> Any:
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", TRITON)))
        environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path), **variables}
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / "triton_checks.py"), what]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_kernel_takes_the_steps_that_torchs_operators_take(ask):
    for found in ask("interpreted", TRITON_INTERPRET="1"):
        # Of the largest change. The last bit of a float32 weight may be another, so that few are rounded otherwise.
        assert found["weights"] < 1e-3
        assert found["scales"] < 1e-6 and found["codes"] < 0.01 and found["rounded"] < 0.01
        assert found["changed"] > 0.5


def test_each_value_is_read_once_and_written_once(ask):
    """A thread has 8 values: 16 bytes of bf16 or int16, and 8 of codes. Scales are 4.

    Before that a program reads of its weight six or seven addresses, size, seed and where its programs begin (this also
    to find the weight), and eight factors.
    """
    for name, found in ask("compiled").items():
        assert found.pop("code") > 0 and found.pop("local") == 0, "registers suffice"
        more = "remainders" in name
        loads = {"ld 16": 2 + more, "ld 8": 2 + 10 + more, "ld 4": 2 + 8}
        assert found == loads | {"st 16": 1 + more, "st 8": 2, "st 4": 2}, name
