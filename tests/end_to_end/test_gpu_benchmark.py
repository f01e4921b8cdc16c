"""`benchmarks/gpu.py` in miniature, on the CPU: cases run, and a run that was cut off continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
sys.path.append(str(SCRIPT.parent))

from gpu_cases import Case, all_cases  # noqa: E402
from gpu_check import STEPS  # noqa: E402


@pytest.mark.long
def test_the_benchmark_continues_and_prints_what_it_measured(tmp_path):
    file = tmp_path / "results.jsonl"
    missing, *others = [case for case in all_cases(tiny=True) if case.part == "batches"]
    kept = [
        json.dumps({"part": case.part, "name": case.name, "flags": case.flags, "s/step": 4321.0, "norms": []})
        for case in others
    ]
    file.write_text("\n".join([*kept, kept[0][:30]]))  # killed while it wrote the last line
    command = [sys.executable, str(SCRIPT), "--tiny", f"--results={file}", "attention", "batches"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in file.read_text().splitlines()[len(kept) + 1 :] if line]
    failed = {record["name"]: record["error"] for record in records if "error" in record}
    assert set(failed) == {"cudnn", "flash3", "efficient"}  # kernels that no CPU has
    assert all(error.startswith("SettingsError") for error in failed.values())
    (step,) = [record for record in records if record["part"] == "batches"]
    assert step["name"] == missing.name
    assert step["s/step"] > 0
    rows = [line for line in run.stdout.splitlines() if line.startswith("  batches: ")]
    assert len(rows) == 4
    assert ["4,321" in row for row in rows] == [False, True, True, True]
    assert "attention: auto" in run.stdout


@pytest.mark.long
def test_the_check_of_a_gpu_is_one_table_of_what_is_assumed_and_what_is_here(tmp_path):
    check = [sys.executable, str(SCRIPT.with_name("gpu_check.py"))]
    command = [*check, "--tiny", "--json", "machine", "killed", "steps", "link"]
    environment = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    assert "torchao" not in done.stderr, "what it says of tensors and kernels that nothing here uses"
    rows = json.loads(done.stdout)["rows"]
    written = [json.loads(line) for line in (tmp_path / "gpu-check.jsonl").read_text().splitlines()]
    assert [{name: row[name] for name in rows[0]} for row in written] == rows, "each as soon as it was measured"
    found = {row["what"]: row["here"] for row in rows}
    assert found["context, MiB"] == "not measured here", "there is no nvidia-smi"
    assert found["bf16 products, TFLOP/s"] > 0 and found["all_gather of 2 ranks, GB/s"] > 0
    assert all(found[f"{name}: s/step"] > 0 for name in STEPS), "each by the plan of its own model"
    assert found["losses after SIGKILL and resuming, off by"] == 0
    none = subprocess.run(check, capture_output=True, text=True, timeout=500)
    assert (none.returncode, none.stderr.partition("\n")[0]) == (3, "error: torch sees no CUDA device here")


def test_settings_of_all_cases_are_valid():
    for tiny in (True, False):
        cases = [case for case in all_cases(tiny) if "model_family" in case.flags]
        assert len({(case.part, case.name) for case in cases}) == len(cases)
        in_eights = [case for case in cases if case.part in ("levers", "batches", "sdxl")]
        assert {case.settings.effective_batch_size for case in in_eights} == {8}
        assert all(case.settings for case in cases)
    assert all(Case("levers", name, flags).settings for name, flags in STEPS.items())
