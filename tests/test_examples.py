"""examples/automatic: the commands at the top of each file draw data and a base model that its settings train on."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from simpletuner.models.automatic.family import AutomaticFamily
from simpletuner.models.family.base import family_class
from simpletuner.parallel.mesh import Mesh
from simpletuner.parallel.world import joined_world
from simpletuner.preparation.plan import samples_by_shape
from simpletuner.preparation.prepare import fit_to_model, plan_data
from simpletuner.report import Report
from simpletuner.session import Session
from simpletuner.settings import load
from simpletuner.system.processes.signals import StopRequest

ROOT = Path(__file__).parents[1]


def commands(config: Path) -> list[list[str]]:
    """Return the scripts that the head of a file of settings names, with their arguments."""
    head = config.read_text().split("\n\n")[0].replace("\\\n#", " ").splitlines()
    return [shlex.split(line.removeprefix("#"))[1:] for line in head if line.startswith("#   python ")]


@pytest.mark.parametrize(("name", "given"), [("edits", "64x64+64x64"), ("clips", "64x64@9+first_frame")])
def test_an_example_of_auto_starts_with_what_its_own_commands_make(name, given, monkeypatch, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    config = Path("examples", "automatic", f"{name}.toml")
    scripts = commands(config)
    assert [each[0] for each in scripts] == ["examples/shapes/draw.py", "examples/automatic/base.py"]
    for script in scripts:
        monkeypatch.setattr(sys, "argv", [each.replace("288", "32") for each in script])
        runpy.run_path(script[0], run_name="__main__")
    loaded = load({"train_batch_size": "4"}, config)
    model = loaded.settings.model
    family = family_class(model).open(Path(model.pretrained_model_name_or_path), loaded.settings)
    with joined_world({}, use_cpu=True) as world:
        session = Session(loaded, Mesh(world), Report(quiet=True), StopRequest())
        plan, sampled = fit_to_model(session, plan_data(session), family)
        assert isinstance(family, AutomaticFamily) and sampled
        assert [str(each) for each in samples_by_shape(plan)] == [given]
        family.prove([*samples_by_shape(plan)], torch.device("cpu"))
    assert family.found.images is not None
