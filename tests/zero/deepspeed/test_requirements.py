"""Unsupported platforms, missing compilers, unusable offload folders: real files, real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import PATIENCE

from simpletuner.deepspeed.requirements import check_disk, check_platform, check_settings, links_libaio
from simpletuner.errors import EnvironmentNotReady, ExitCode
from simpletuner.settings import load

ROOT = Path(__file__).parents[2]
NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}
CUDA = "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
ROCM = CUDA.replace("'13.0'", "None").replace("hip: Optional[str] = None", "hip: Optional[str] = '7.1.25424'")


BUILD = ("deepspeed", "build", "--stage=2")


def run(folder: Path, *arguments: str, **packages: str) -> subprocess.CompletedProcess[str]:
    """Run a command where some packages are installed that only consist of a version.py."""
    for name, text in packages.items():
        (folder / "site" / name).mkdir(parents=True)
        (folder / "site" / name / "__init__.py").write_text("raise ImportError('imported')\n")
        (folder / "site" / name / "version.py").write_text(text)
    paths = os.pathsep.join([str(folder / "site"), str(ROOT)])
    command = [sys.executable, "-m", "simpletuner", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, env=environment)


def test_torch_for_rocm_is_recognized_without_importing_it(tmp_path):
    done = run(tmp_path, *BUILD, torch=ROCM, deepspeed="")
    assert done.returncode == ExitCode.ENVIRONMENT
    assert done.stderr.startswith("error: DeepSpeed is not supported with torch for ROCm (7.1.25424)")
    assert done.stdout == ""


@pytest.mark.parametrize("command", [("config", "validate", "c.toml"), ("deepspeed", "validate", "ds.json")])
def test_validate_commands_refuse_rocm_too(tmp_path, command):
    (tmp_path / "c.toml").write_text('model_family = "sdxl"\ninstance_data_dir = "."\nzero_stage = 2\n')
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    done = run(tmp_path, *command, torch=ROCM)
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "DeepSpeed is not supported with torch for ROCm" in done.stderr


def test_config_validate_counts_the_weights_that_would_be_offloaded(tmp_path):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [10**9, 10**6], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model" / "unet").mkdir(parents=True)
    (tmp_path / "model" / "unet" / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    (tmp_path / "c.toml").write_text(
        'model_family = "sdxl"\npretrained_model_name_or_path = "model"\ninstance_data_dir = "."\n'
        'zero_stage = 3\noffload_optimizer = "nvme"\noffload_param_path = "swap"\n'
    )
    done = run(tmp_path, "config", "validate", "c.toml")
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "swap has " in done.stderr
    assert "DeepSpeed needs about 16.0 PB there" in done.stderr


def test_torch_for_cuda_and_deepspeed_are_enough(tmp_path):
    done = run(tmp_path, *BUILD, torch=CUDA, deepspeed="")
    assert done.returncode == ExitCode.OK
    assert "not installed" not in done.stderr


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_missing_libaio_is_reported_before_any_rank_is_started(tmp_path, monkeypatch):
    if not links_libaio("c++"):
        assert "CI" not in os.environ, "libaio-dev is missing"
        pytest.skip("libaio-dev is not installed (`make tools`)")
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-laio*) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    flags = ("--model_family=sdxl", "--model_flavour=tiny", f"--instance_data_dir={tmp_path}", "--num_processes=2")
    swap = ("--zero_stage=3", "--offload_optimizer=nvme", f"--offload_param_path={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "simpletuner", "train", *flags, *swap, f"--output_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "libaio and its headers are missing" in done.stderr and "apt install libaio-dev" in done.stderr
    assert done.stderr.count("error: ") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("platform", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_other_systems_are_refused_with_the_reason(platform, name):
    with pytest.raises(EnvironmentNotReady, match=f"DeepSpeed does not run on {name}") as caught:
        check_platform(platform)
    assert "fsdp_enable=true" in caught.value.hint


def test_nothing_is_checked_where_deepspeed_is_off(tmp_path):
    assert check_settings(load({}, complete=False, environment=NOWHERE).settings) == []


def test_checking_an_offload_folder_creates_nothing(tmp_path):
    check_disk(tmp_path / "a" / "b", needed_bytes=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentNotReady, match=f"offload_param_path = {tmp_path}/file/x: {tmp_path}/file is a file"):
        check_disk(tmp_path / "file" / "x", needed_bytes=1)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a filesystem in which nothing can be made")
def test_a_folder_that_cannot_be_created_is_reported():
    with pytest.raises(EnvironmentNotReady, match="offload_param_path = /proc/self/swap cannot be created: "):
        check_disk(Path("/proc/self/swap"), needed_bytes=1)


def test_too_little_disk_space_is_reported_with_needed_and_free_bytes(tmp_path):
    with pytest.raises(EnvironmentNotReady, match=r"has .* free; DeepSpeed needs about 1.0 EB there"):
        check_disk(tmp_path, needed_bytes=10**18)


def test_needed_disk_space_is_that_of_the_ranks_of_one_machine(tmp_path):
    flags = {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param_path": str(tmp_path), "num_processes": 4}
    settings = load(flags, complete=False, environment=NOWHERE).settings
    with pytest.raises(EnvironmentNotReady, match=r"DeepSpeed needs about 16.0 PB there"):
        check_settings(settings, num_parameters=10**15)
    two = load({**flags, "num_machines": 2, "main_process_ip": "x"}, complete=False, environment=NOWHERE).settings
    with pytest.raises(EnvironmentNotReady, match=r"DeepSpeed needs about 8.0 PB there"):
        check_settings(two, num_parameters=10**15)
    check_settings(settings, num_parameters=1000)
