"""The example of docs/families.md, as a user would save, register and train it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from conftest import ROOT, SMALL
from flags import last_wins
from models.test_inputs import expect_same_inputs, expect_same_picture

from simpletuner.errors import SettingsError
from simpletuner.models.family.base import family_class
from simpletuner.settings.declared.sections import Model, Settings

PAGE = ROOT / "docs" / "families.md"
NAME = "pixart_alpha"
INCOMPLETE = """
from simpletuner.models.family.base import ModelFamily

class Own(ModelFamily):
    def predict(self, model, noised_BCHW, timesteps_B, conditioning):
        return noised_BCHW

class NoTiny(Own):
    pipelines = ("SomePipeline",)
    objective = encode_prompts = Own.predict
    tiny_pipeline = "incomplete:nothing"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder that holds the module of the page, and nothing else."""
    folder = tmp_path_factory.mktemp("own")
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "my_family.py").write_text(code, encoding="utf-8")
    (folder / "incomplete.py").write_text(INCOMPLETE, encoding="utf-8")
    return folder


def flags_of(output: Path, shapes: Path, *flags: str) -> list[str]:
    chosen = ("--model_family=pixart-alpha", "--model_flavour=tiny", f"--instance_data_dir={shapes}")
    steps = ("--max_train_steps=2", "--train_batch_size=2", f"--output_dir={output}")
    return ["train", *last_wins((*chosen, *SMALL, *steps, *flags))]


def train(folder: Path, output: Path, shapes: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own, which finds the modules of a folder."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-m", "simpletuner", *flags_of(output, shapes, *flags)]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=folder)


def test_the_page_s_family_trains_by_a_setting_as_well_as_a_built_in_one(folder, shapes, tmp_path, monkeypatch):
    done = train(folder, tmp_path / "run", shapes, f"--model_families={NAME}=my_family:PixArtAlpha")
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(folder)
    model = Model(model_family=NAME, model_families={NAME: "my_family:PixArtAlpha"})
    family = family_class(model).open(tmp_path / "run" / "pipeline", Settings(model=model))
    expect_same_inputs(family)
    expect_same_picture(family)


def test_an_installed_package_registers_a_family_by_an_entry_point(folder, shapes, tmp_path, starter):
    package = tmp_path / "site"
    metadata = package / "my_family-1.0.dist-info"
    metadata.mkdir(parents=True)
    (package / "my_family.py").write_text((folder / "my_family.py").read_text())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-family\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[simpletuner.families]\n{NAME} = my_family:PixArtAlpha\n")
    run = starter.start(ranks.command_line_beside, 1, str(package), flags_of(tmp_path / "run", shapes))
    assert run.wait() == [0], run.said
    assert (tmp_path / "run" / "pipeline" / "model_index.json").exists()


@pytest.mark.parametrize(
    ("families", "family", "message"),
    [
        (f"{NAME}=my_family:NOTHING", NAME, f"model_families: {NAME} = my_family:NOTHING: "),
        (f"{NAME}=no_such_module:X", NAME, "No module named 'no_such_module'"),
        (f"{NAME}=my_family.PixArt", NAME, "'my_family.PixArt' is not an import path: write package.module:ClassName"),
        (f"{NAME}=my_family:build_tiny", NAME, "it is of type function, but must be a subclass of ModelFamily"),
        (f"{NAME}=my_family:PixArtAlphaPipeline", NAME, "it is the class PixArtAlphaPipeline, but must be a subclass"),
        (f"{NAME}=incomplete:Own", NAME, "Own does not define pipelines, encode_prompts, objective"),
        (f"{NAME}=incomplete:NoTiny", NAME, "NoTiny.tiny_pipeline = incomplete:nothing: "),
        (f"{NAME}=my_family:PixArtAlpha", "pixart_alfa", "Unknown model_family 'pixart_alfa'; did you mean `pixart_a"),
    ],
)
def test_a_family_that_cannot_be_found_is_a_sentence(families, family, message, folder, shapes, tmp_path, starter):
    flags = flags_of(tmp_path / "run", shapes, f"--model_families={families}", f"--model_family={family}")
    run = starter.start(ranks.command_line_beside, 1, str(folder), flags)
    assert run.wait() == [2], run.said
    assert message in run.said and "Traceback" not in run.said


@pytest.mark.parametrize("name", ["", "nosuch"])
def test_no_family_is_said_as_such(name):
    """As of a run's settings.json that has lost a line."""
    with pytest.raises(SettingsError, match=f"Unknown model_family '{name}'"):
        family_class(Model(model_family=name))
