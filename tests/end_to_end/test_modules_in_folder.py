"""Files of the current folder that are named like libraries: no process that this program starts imports them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SMALL
from page_server import page_server
from patience import PATIENCE

from simpletuner.system.files.locks import RUN_LOCK, is_locked
from simpletuner.system.processes.run_status import STATUS, read_status

NAMES = ("queue", "typing", "torch", "wandb", "huggingface_hub", "simpletuner", "json", "sitecustomize")
FLAGS = (
    *(*SMALL, "--model_family=sdxl", "--model_flavour=tiny", "--max_train_steps=2", "--train_batch_size=2"),
    *("--num_processes=2", "--use_cpu", "--output_dir=out", "--report_to=wandb", "--push_to_hub=true"),
    *("--hub_model_id=me/shapes", "--model_card_private=true"),
)
OWN = {"WANDB_MODE": "offline", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}


@pytest.fixture
def folder(tmp_path: Path, shapes: Path) -> Path:
    """A folder with such files, each of which notes that it was run, and a configuration."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + '\\n')\n")
    values = [flag[2:].partition("=") for flag in (*FLAGS, f"--instance_data_dir={shapes}")]
    (folder / "run.toml").write_text("".join(f"{name} = '{value or 'true'}'\n" for name, _, value in values))
    return folder


def ends(output: Path) -> str:
    """Wait until a run that the page has started has ended, its processes too, and return what it said."""
    console, end = output / "console.txt", time.monotonic() + PATIENCE
    while not ((status := read_status(output / STATUS)) and status.has_ended and not is_locked(output / RUN_LOCK)):
        assert time.monotonic() < end, console.read_text()
        time.sleep(0.1)
    return console.read_text()


@pytest.mark.long
def test_a_file_of_the_folder_that_is_named_like_a_library_is_never_run(folder: Path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | OWN
    command = [sys.executable, "-m", "queue"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    assert (folder.parent / "ran").read_text().split() == ["queue"], "it is run where nothing prevents it"
    (folder.parent / "ran").unlink()
    program = str(Path(sys.executable).with_name("simpletuner"))
    with page_server(folder, environment=OWN) as server:
        assert server.post("/runs/start", {"file": "run.toml"}).code == 200
        detected = server.post("/blocks/detect", {"file": "run.toml"})
        assert detected.code == 200 and "BasicTransformerBlock" in detected.text, detected.text
        said = ends(folder / "out")
    assert "finished" in said and "was not uploaded to me/shapes" in said and list(folder.rglob("offline-run-*"))
    # The page has started these by `-m`: the script, which imports from its own folder, once.
    command = [program, "train", "--num_processes=1", "--max_train_steps=3", "--config=run.toml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "resuming" in done.stderr, done.stderr
    assert not (folder.parent / "ran").exists(), (folder.parent / "ran").read_text()


def test_python_processes_are_started_by_one_function():
    paths = [path for path in (ROOT / "simpletuner").rglob("*.py") if "[sys.executable" in path.read_text()]
    assert [path.name for path in paths] == ["python_process.py"]
