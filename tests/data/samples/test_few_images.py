"""Buckets that cannot fill the effective batch are found before torch is imported, where images are few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from PIL import Image

from simpletuner.data.samples.dataset_warnings import MOST_FILES, check_few_images
from simpletuner.errors import DataError, ExitCode
from simpletuner.settings import load

PROGRAM = """
import sys
from simpletuner.app import main
try:
    main(sys.argv[1:])
finally:
    print("imported:", [name for name in ("torch", "diffusers") if name in sys.modules])
"""


@pytest.fixture
def photographs(tmp_path) -> Path:
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (64, 64 + 32 * (number == 0))).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a square")
    return folder


def check(folder: Path, **flags: object) -> None:
    data = {"instance_data_dir": str(folder)} if folder.is_dir() else {"data_backend_config": str(folder)}
    flags = {"model_family": "sdxl", "resolution": 64, "aspect_bucket_alignment": 16, **data, **flags}
    check_few_images(load(flags, complete=False, environment={}).settings)


def test_a_launcher_counts_a_few_images_before_it_starts_ranks(photographs, tmp_path):
    output = tmp_path / "output"
    flags = ["--model_family=sdxl", "--model_flavour=tiny", "--resolution=64", "--aspect_bucket_alignment=16"]
    flags += [f"--instance_data_dir={photographs}", f"--output_dir={output}", "--num_processes=8", "--use_cpu"]
    command = [sys.executable, "-P", "-c", PROGRAM, "train", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == ExitCode.DATA, done.stderr
    assert "2 of 2 aspect buckets cannot fill the effective batch of 32" in done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"
    assert not output.exists()


def test_the_batch_that_counts_is_that_of_all_ranks_and_passes(photographs):
    check(photographs, train_batch_size=1)
    with pytest.raises(DataError, match="1 of 2 aspect buckets"):
        check(photographs, train_batch_size=1, num_processes=2)
    with pytest.raises(DataError, match="1 of 2 aspect buckets"):
        check(photographs, train_batch_size=1, gradient_accumulation_steps=5)
    check(photographs, train_batch_size=1, num_processes=8, allow_dataset_oversubscription=True)


def test_what_only_ranks_can_judge_is_left_to_them(photographs, tmp_path):
    datasets = tmp_path / "datasets.json"

    def with_keys(**keys: object) -> Path:
        entry = {"id": "squares", "type": "local", "instance_data_dir": str(photographs), **keys}
        other = {"id": "later", "type": "local", "instance_data_dir": str(photographs), "start_epoch": 2}
        datasets.write_text(json.dumps([entry, other] if "end_epoch" in keys else [entry]))
        return datasets

    with pytest.raises(DataError, match="2 of 2 aspect buckets"):
        check(with_keys(), num_processes=8)
    check(with_keys(end_epoch=1), num_processes=8)
    for number in range(MOST_FILES):
        (photographs / f"{number}.jpg").touch()
    check(photographs, num_processes=8)
