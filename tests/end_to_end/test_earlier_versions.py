"""What an earlier commit wrote goes on as that commit itself goes on: bit for bit, and nothing is encoded again."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from recorded_run import COMMAND, SAME_ON_EVERY_CPU, copy_inputs
from safetensors.torch import load_file

from simpletuner.system.files.cache_files import COMPLETE, MERGED_INDEX

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parents[1] / "fixtures"
COMMIT = "31ae910"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the last bit of a sum depends on the kind of CPU")
def test_a_run_that_an_earlier_commit_began_ends_with_the_bits_it_would_have_had(tmp_path):
    fixture, ours = FIXTURES / f"from_{COMMIT}", tmp_path / "ours"
    said = resume(fixture, ours)
    assert "resuming from run/checkpoints/checkpoint-000002" in said
    for word in ("making", "warning"):
        assert word not in said, said
    before, found = (cached_files(folder / "run" / "cache") for folder in (fixture / "before", ours))
    assert sum(name.endswith(".shard") for name in found) == 2
    assert found == before, "every record was found, so nothing was written"

    theirs = fixture / "after"
    assert is_close(ours, theirs)
    if not is_same(ours, theirs):  # another kind of CPU than the one that recorded it: let the old code run on this one
        theirs = tmp_path / "theirs"
        resume(fixture, theirs, PYTHONPATH=str(code_of(COMMIT, tmp_path / "code")))
    assert numbers_of_steps(ours / "run") == numbers_of_steps(theirs / "run")
    held = tensors_of(theirs)
    assert {group for group, _ in held} == {"model", "ema", "exp_avg", "exp_avg_sq"}
    assert tensors_of(ours).keys() == held.keys()
    assert is_same(ours, theirs)


def code_of(commit: str, folder: Path) -> Path:
    """Write the package as it was at a commit. Skips the test in a clone without its history."""
    if subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip(f"the bits of this CPU differ from the recorded ones, and this clone lacks {commit}")
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit, "simpletuner"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], input=archive.stdout, cwd=folder, check=True)
    return folder


def resume(fixture: Path, folder: Path, **variables: str) -> str:
    """Resume a copy of what the commit wrote, and return what the run said."""
    copy_inputs(folder)
    shutil.copytree(fixture / "before" / "run", folder / "run")
    # A process of its own, since these variables are read when torch is loaded. Without them the losses are the same,
    # but 750 of 832 tensors differ in their last bit between AVX512, AVX2 and SSE, and between one thread and two. With
    # them 712 still do between some kinds of CPU (Zen 5 and the recording one).
    environment = os.environ | SAME_ON_EVERY_CPU | variables
    done = subprocess.run(COMMAND, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stderr


def cached_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a cache, but for those that are made from the others and from the images."""
    derived = (MERGED_INDEX, COMPLETE, "*.arrow")
    files = [path for path in folder.rglob("*") if path.is_file() and not any(map(path.match, derived))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def is_same(one: Path, other: Path) -> bool:
    """Return whether two runs ended with the same bits."""
    mine, yours = tensors_of(one), tensors_of(other)
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


def is_close(one: Path, other: Path) -> bool:
    """Return whether two runs ended with the same tensors up to rounding, relative to each one's largest value."""
    mine, yours = tensors_of(one), tensors_of(other)
    return mine.keys() == yours.keys() and all(
        (mine[name] - yours[name]).abs().max() <= 1e-5 * yours[name].abs().max() for name in mine
    )


def numbers_of_steps(run: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = ("step", "epoch", "learning_rate", "loss", "grad_norm")
    return [{name: row[name] for name in kept} for row in rows]


def tensors_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return every tensor of the last checkpoint under its group (weights, a moment, EMA) and name."""
    files = (folder / "run" / "checkpoints" / "checkpoint-000005").glob("*/*.safetensors")
    return {(file.parent.name, name): tensor for file in files for name, tensor in load_file(file).items()}
