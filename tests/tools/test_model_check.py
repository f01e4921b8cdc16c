"""`simpletuner models --check`: the proof alone, as a user types it, and a class against the pipeline's own run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable

import pytest
from foreign import build_foreign
from models.test_image_to_video import save_wan
from modular import as_modular

from simpletuner.app import main

OPPOSITE = """
from simpletuner.models.families.flux import Flux


class Opposite(Flux):
    def predict(self, *arguments):
        return -super().predict(*arguments)
"""


@pytest.fixture
def checked(capsys, monkeypatch, tmp_path) -> Callable[..., tuple[str, str]]:
    monkeypatch.chdir(tmp_path)

    def checked(*arguments: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["models", *arguments])
        said = capsys.readouterr()
        assert ended.value.code == code, said.err
        return said.out, " ".join(said.err.split())

    return checked


def test_a_built_in_class_is_compared_with_the_pipeline_s_own_run(flux, checked):
    table, said = checked("--check", str(flux))
    assert f"FluxPipeline in {flux}" in table and "differs" not in table and "warning" not in said
    assert "own loop     ok   exact predictions lead it to known latents (off by" in table
    assert "prediction   ok   of Flux is that of FluxPipeline, caption 2 (off by" in table


def test_a_modular_pipeline_is_proven(flux, checked, tmp_path):
    folder = as_modular(flux, tmp_path / "modular", "FluxModularPipeline")
    found = json.loads(checked("--check", str(folder), "--json")[0])
    assert found["passed"] and found["pipeline"] == "FluxModularPipeline" and len(found["checks"]) == 8


def test_a_class_with_a_wrong_sign_is_named(flux, checked, tmp_path):
    (tmp_path / "opposite_flux.py").write_text(OPPOSITE)
    out, said = checked("--check", str(flux), "--class=opposite_flux:Opposite", "--json", code=2)
    sys.modules.pop("opposite_flux", None)
    found = json.loads(out)
    assert not found["passed"] and found["proven"]["pipeline"].startswith("FluxPipeline by its own call")
    failed = [(check["name"], check["off"]) for check in found["checks"] if not check["passed"]]
    assert failed == [("prediction", pytest.approx(2)), ("prediction", pytest.approx(2))]
    assert "the class differs from the pipeline's own run: prediction of Opposite" in said


def test_a_video_pipeline_is_checked_on_clips_and_on_images_alone_where_it_makes_none(checked, pipelines, tmp_path):
    found = json.loads(checked("--check", str(pipelines("wan")), "--json")[0])
    loops = [check["finding"] for check in found["checks"] if check["name"] == "own loop"]
    assert [loop.endswith(", 64x64@5") for loop in loops] == [True, False] and found["passed"]
    assert "clips and images" in found["proven"]["found"] and found["checks"][-1]["name"] == "prediction"
    found = json.loads(checked("--check", str(build_foreign("LattePipeline", tmp_path / "latte")), "--json")[0])
    assert found["passed"] and found["checks"][-1]["finding"].startswith("not trained: its VAE encodes no clip: Val")


@pytest.mark.parametrize("name", ["Krea2Pipeline", "KolorsPipeline"])
def test_of_a_family_without_a_class_the_proof_is_all(name, checked, tmp_path):
    """The text encoder and the tokenizer of Kolors are classes of diffusers' package of its pipeline."""
    found = json.loads(checked("--check", str(build_foreign(name, tmp_path / "base")), "--json")[0])
    assert found["passed"] and found["checks"][-1]["name"] == "gradients"


def test_a_pipeline_that_cannot_be_proven_is_refused_after_what_could_be(checked, tmp_path):
    folder = build_foreign("PixArtAlphaPipeline", tmp_path / "base", scheduler={"class_name": "DDIMScheduler"})
    out, said = checked("--check", str(folder), "--json", code=2)
    found = json.loads(out)
    assert [check["name"] for check in found["checks"]] == ["objective", "inputs"] and not found["passed"]
    assert found["refusal"] in said and "do not lead its own loop to known latents" in said
    assert "nothing is no folder" in checked("--check", str(tmp_path / "nothing"), code=2)[1]
    assert "--class is for --check" in checked("--class=a:B", code=2)[1]


def test_pipelines_that_are_given_images_are_proven_with_them(flux, pipelines, checked, tmp_path):
    kontext = shutil.copytree(flux, tmp_path / "kontext")
    index = json.loads((kontext / "model_index.json").read_text())
    (kontext / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxKontextPipeline"}))
    found = json.loads(checked("--check", str(kontext), "--json")[0])
    assert found["passed"] and found["proven"]["given"] == "references by hidden_states"
    shown = [check["finding"] for check in found["checks"] if check["name"] == "references"]
    assert [each.startswith("reach the denoiser by") for each in shown] == [True, False]
    continued = save_wan(pipelines("wan"), tmp_path / "wan", "2.2-14b")
    found = json.loads(checked("--check", str(continued), "--json")[0])
    assert found["passed"] and found["proven"]["given"] == "first frame by hidden_states"
