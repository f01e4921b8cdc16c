"""Fetching a pipeline from a real server on loopback that speaks the hub's language."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL
from hub import Hub, serving
from modular import as_modular

NAME = "somebody/tiny-flux"
DECOYS = ("flux1-dev.safetensors", "transformer/model.fp16.safetensors", "text_encoders/clip.safetensors", "demo.png")
"""What published repositories hold beside the pipeline itself."""


@pytest.fixture
def hub(flux, tmp_path):
    shutil.copytree(flux, tmp_path / "hub" / NAME)
    for decoy in DECOYS:
        path = tmp_path / "hub" / NAME / decoy
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"many gigabytes")
    with serving(tmp_path / "hub") as hub:
        yield hub


def train(
    hub: Hub, output: Path, shapes: Path, name: str, family: str = "flux", **environment: str
) -> subprocess.CompletedProcess[str]:
    model = (f"--model_family={family}", f"--pretrained_model_name_or_path={name}", f"--instance_data_dir={shapes}")
    steps = ("--max_train_steps=1", "--train_batch_size=2", f"--output_dir={output}")
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(output.parent / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "simpletuner", "train", *model, *SMALL, *steps]
    return subprocess.run(command, env=os.environ | own | environment, capture_output=True, text=True)


def test_a_pipeline_is_fetched_without_what_nobody_needs_and_found_again_offline(hub, flux, shapes, tmp_path):
    done = train(hub, tmp_path / "run", shapes, NAME)
    assert done.returncode == 0, done.stderr
    needed = {str(path.relative_to(flux)) for path in flux.rglob("*") if path.is_file()}
    assert set(hub.fetched) == needed
    hub.fetched.clear()
    offline = train(hub, tmp_path / "again", shapes, NAME, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert hub.fetched == []


def test_a_modular_pipeline_is_fetched_with_its_own_index(hub, flux, shapes, tmp_path):
    folder = as_modular(flux, tmp_path / "hub/somebody/modular", "FluxModularPipeline")
    done = train(hub, tmp_path / "run", shapes, "somebody/modular", family="auto")
    assert done.returncode == 0, done.stderr
    assert set(hub.fetched) == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert "FluxModularPipeline by its own call" in " ".join(done.stderr.split())


def test_what_the_hub_does_not_have_is_one_sentence(hub, shapes, tmp_path):
    done = train(hub, tmp_path / "run", shapes, "somebody/nothing")
    assert done.returncode == 3, done.stderr
    assert "cannot fetch somebody/nothing from the hub" in done.stderr
    assert "Traceback" not in done.stderr
