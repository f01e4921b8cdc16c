"""Fetching a pipeline from a real server on loopback that speaks the hub's language."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import ranks
from conftest import ROOT, SMALL
from hub import COMMIT, Hub, serving
from modular import as_modular
from safetensors import safe_open

NAME = "somebody/tiny-flux"
DECOYS = ("flux1-dev.safetensors", "transformer/model.fp16.safetensors", "text_encoders/clip.safetensors", "demo.png")
"""What published repositories hold beside the pipeline itself."""


LATER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def hub(flux, tmp_path):
    shutil.copytree(flux, tmp_path / "hub" / NAME)
    for decoy in DECOYS:
        path = tmp_path / "hub" / NAME / decoy
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"many gigabytes")
    with serving(tmp_path / "hub") as hub:
        yield hub


def command(output: Path, shapes: Path, name: str, family: str = "flux") -> list[str]:
    model = (f"--model_family={family}", f"--pretrained_model_name_or_path={name}", f"--instance_data_dir={shapes}")
    return ["train", *model, *SMALL, "--max_train_steps=1", "--train_batch_size=2", f"--output_dir={output}"]


def variables(hub: Hub, folder: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}


@pytest.fixture
def fetch(hub, starter, shapes, tmp_path):
    """Train on a model of the hub, and return what was said."""

    def run(output: str, name: str, family: str = "flux", more: Sequence[str] = (), **variable: str) -> str:
        arguments = [*command(tmp_path / output, shapes, name, family), *more]
        run = starter.start(ranks.command_line_at_hub, 1, variables(hub, tmp_path) | variable, arguments)
        assert run.wait() == [0], run.said
        return run.said

    return run


def test_a_pipeline_is_fetched_without_what_nobody_needs_and_found_again_offline(hub, flux, fetch):
    fetch("run", NAME)
    needed = {str(path.relative_to(flux)) for path in flux.rglob("*") if path.is_file()}
    assert set(hub.fetched) == needed
    hub.fetched.clear()
    fetch("again", NAME, HF_HUB_OFFLINE="1")
    assert hub.fetched == []


def test_a_base_of_the_hub_is_named_in_the_card_and_the_header_of_what_is_merged(hub, flux, starter, tmp_path):
    for words, code in ((["--output=merged"], 0), (["--output=other", "--revision=none"], 3)):
        words[0] = f"--output={tmp_path / words[0].partition('=')[2]}"
        arguments = ["lora", "merge", NAME if code == 0 else "nobody/nothing", "--export_precision=float8", *words]
        run = starter.start(ranks.command_line_at_hub, 1, variables(hub, tmp_path), arguments)
        assert run.wait() == [code], run.said
    assert "cannot fetch nobody/nothing" in run.said and not (tmp_path / "other").exists()
    assert set(hub.fetched) == {str(path.relative_to(flux)) for path in flux.rglob("*") if path.is_file()}
    assert f"base_model: {NAME}" in (tmp_path / "merged" / "README.md").read_text()
    [file] = (tmp_path / "merged" / "transformer").glob("*.safetensors")
    with safe_open(file, "pt") as header:
        assert header.metadata()["base_model"] == NAME


def test_a_modular_pipeline_is_fetched_with_its_own_index(hub, flux, fetch, tmp_path):
    folder = as_modular(flux, tmp_path / "hub/somebody/modular", "FluxModularPipeline")
    said = fetch("run", "somebody/modular", "auto")
    assert set(hub.fetched) == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert "FluxModularPipeline by its own call" in " ".join(said.split())


def test_a_run_is_of_one_commit_of_its_base_model(hub, fetch, starter, shapes, tmp_path):
    """A branch that moves between two starts, or between two machines of a start, changes nothing."""
    fetch("run", NAME)
    pushed = tmp_path / "pushed"
    shutil.copytree(tmp_path / "hub", pushed)
    with (pushed / NAME / "vae/config.json").open("a") as file:
        file.write("\n")
    hub.push(LATER, pushed)
    machines = starter.start(
        ranks.machine_at_hub, 2, variables(hub, tmp_path), command(tmp_path / "machines", shapes, NAME)
    )
    assert machines.wait() == [0, 0] and f"{NAME}@{COMMIT}" in machines.said, machines.said
    shutil.rmtree(tmp_path / "home")  # as on a machine that has nothing of it yet
    said = fetch("run", NAME, more=["--max_train_steps=2"])
    assert f"{NAME}@{COMMIT}" in said and LATER not in said and "changed since the checkpoint" not in said
    shutil.rmtree(tmp_path / "home")
    hub.roots.clear()  # as where somebody has rewritten the branch
    again = [*command(tmp_path / "run", shapes, NAME), "--max_train_steps=3"]
    refused = starter.start(ranks.command_line_at_hub, 1, variables(hub, tmp_path), again)
    assert refused.wait() == [3] and f"cannot fetch {NAME} at {COMMIT} from the hub" in refused.said, refused.said
    assert "--revision=main takes what is there now" in " ".join(refused.said.split())
    said = fetch("run", NAME, more=["--max_train_steps=3", "--revision=main"])
    sentence = f"base commit was {NAME}@{COMMIT} at the checkpoint, and is {NAME}@{LATER} now"
    assert sentence in " ".join(said.split())


def test_what_the_hub_does_not_have_is_one_sentence(hub, shapes, tmp_path):
    program = [sys.executable, "-m", "simpletuner", *command(tmp_path / "run", shapes, "somebody/nothing")]
    done = subprocess.run(program, env=os.environ | variables(hub, tmp_path), capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "cannot fetch somebody/nothing from the hub" in done.stderr
    assert "Traceback" not in done.stderr
