"""Steps of tiny models on a CUDA device that computes nothing (tests/support/fake_gpu), each after a resume: what they
wait for, communicate and hold. One process rehearses all, since torch asks for its CUDA hooks once."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="there is no C++ compiler"),
]
CASES = (
    "plain", "ddp", "fsdp2", "hsdp", "accumulated", "all-gather", "all-to-all", "muon",
    "schedule-free", "split", "unused", "stays-gathered", "released", "offloaded", "activations", "lora",
    "sharded-lora", "int8", "float8", "sound",
)  # fmt: skip
SEQUENCES = ("all-gather", "all-to-all")
"""Cases that communicate parts of sequences, too."""
TOLERANCES = {
    # plan counts casts to float8 as compiled, within products. Here they run one by one, through float32: 26 % more.
    "float8": 0.3,
}
SMALL_BYTES = 100_000
"""Of sums over the ranks, such as the norm of the gradients and Adafactor's columns."""


@pytest.fixture(scope="module")
def rehearsed(built_once) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}

    def rehearse(file: Path) -> None:
        command = [sys.executable, "-m", "fake_gpu.cases", str(file)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr

    return json.loads(built_once("rehearsed.json", rehearse).read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_nothing_and_holds_what_plan_says(name, rehearsed):
    if name in ("int8", "float8") and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    found = rehearsed[name]
    assert (found["waits"], found["mixed_devices"], found["races"] or {}) == ({}, {}, {})
    assert found["spins"] == 0, "a thread that takes a core looks busy to whoever looks for ranks that hang"
    assert found["peak_bytes"] == pytest.approx(found["planned_bytes"], rel=TOLERANCES.get(name, 0.1)), found["planned"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("int8", "float8")])
def test_a_step_communicates_what_its_layout_needs(name, rehearsed):
    found = rehearsed[name]
    for kind, (count, num_bytes) in found["ideal"].items():
        is_exact = name not in SEQUENCES and not kind.startswith("all-reduce")
        assert found["collectives"][kind] >= count
        assert found["collective_bytes"][kind] >= num_bytes
        if is_exact:
            assert found["collectives"][kind] == count
            assert found["collective_bytes"][kind] == num_bytes
    if "all-reduce float32 cuda" in found["collectives"]:
        scalars = found["collective_bytes"]["all-reduce float32 cuda"]
        scalars -= found["ideal"].get("all-reduce float32 cuda", [0, 0])[1]
        assert scalars < SMALL_BYTES


def test_evaluations_wait_only_for_their_results_and_denoising_for_nothing(rehearsed):
    """Prompts and the pipeline's inputs are copied once per image; none of its three denoising steps waits."""
    waits = {what.rpartition(": ")[2]: count for what, count in rehearsed["fsdp2"]["evaluation"].items()}
    results = {place: count for place, count in waits.items() if "training/" in place}
    inputs = {place: count for place, count in waits.items() if place not in results}
    assert {place.rpartition(":")[0] for place in results} <= {
        "training/validation/held_out.py",
        "training/validation/validator.py",
        "training/ema.py",
    }
    assert sum(results.values()) < 300
    assert [place for place in inputs if "from models/family/" not in place] == []
    assert {*inputs.values()} == {1}, "three, where it is once per step"


def test_planted_defects_are_found(rehearsed):
    reads = rehearsed["defect: reads"]["waits"]
    assert [what.partition(":")[0] for what in reads] == ["item()", "copy of 524288 B from pageable memory"]
    assert rehearsed["defect: cpu tensor"]["mixed_devices"]
    assert rehearsed["defect: stream"]["races"]
    found = rehearsed["defect: shards"]  # a unit is gathered twice, and the largest weight of each is not sharded
    gathered = "all-gather bfloat16 cuda"
    assert found["collectives"][gathered] > found["ideal"][gathered][0]
    assert found["collective_bytes"][gathered] < found["ideal"][gathered][1]
    assert found["held_bytes"]["weights"] > 1.5 * found["planned"]["weights"]


def test_a_step_follows_where_the_system_refuses_to_lock_pages(rehearsed):
    assert rehearsed["refused"]["launches"] > 500


def test_functions_that_are_said_to_be_rehearsed_ran(rehearsed):
    listed = tomllib.loads((ROOT / "benchmarks" / "gpu" / "cuda_functions.toml").read_text())["rehearsed"]
    assert set(listed) - set(rehearsed["called"]) == set()
