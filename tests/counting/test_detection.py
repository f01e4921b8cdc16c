"""Where the architecture comes from, and when what was detected before is still the answer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from simpletuner.counting.block_detection import detect
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.catalog.architecture import architecture_of
from simpletuner.models.catalog.registry import flavours_of
from simpletuner.settings.declared.sections import Model
from simpletuner.system.files.cache_files import block_cache_paths

SMALL = {"_class_name": "FluxTransformer2DModel", "num_layers": 2, "num_single_layers": 3}
CACHED = """
import sys
from simpletuner.counting.block_detection import detect
from simpletuner.settings.declared.sections import Model
found = detect(Model(pretrained_model_name_or_path=sys.argv[1]), False, print)
assert found.cached and found.blocks.recommended
print(sorted({"torch", "numpy", "diffusers", "accelerate", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Work with a home and a hub cache of its own."""
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def pipeline(folder, name="transformer", config=SMALL):
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def downloaded(home, hub, config):
    """Lay out what the hub's client leaves of a download."""
    folder = home / "hub" / f"models--{hub.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    return pipeline(folder / "snapshots" / "c0ffee", config=config)


def never(sentence):
    raise AssertionError(sentence)


def detected(folder, refresh=False, **model):
    return detect(Model(pretrained_model_name_or_path=str(folder), **model), refresh, never)


@pytest.mark.parametrize("name", ["transformer", "unet", "."])
@pytest.mark.parametrize("family", ["", "sdxl", "mine"])
def test_a_folder_decides_whatever_the_family(tmp_path, name, family):
    found = detected(pipeline(tmp_path / "p", name), model_family=family)
    assert found.denoiser == "FluxTransformer2DModel"
    assert found.source == str(tmp_path / "p" / name / "config.json")
    assert found.pretrained_model == str(tmp_path / "p")
    assert {item.class_name: item.count for item in found.blocks.classes if item.recommended} == {
        "FluxTransformerBlock": 2,
        "FluxSingleTransformerBlock": 3,
    }


def test_a_download_outranks_what_is_published_and_that_needs_none(home):
    published = flavours_of("flux")["schnell"]
    model = Model(model_family="flux", model_flavour="schnell")
    assert architecture_of(model, never) == published.architecture
    folder = downloaded(home, published.hub, SMALL)
    found = architecture_of(model, never)
    assert (found.source, found.config) == (str(folder / "transformer" / "config.json"), SMALL)
    (folder / "transformer" / "config.json").write_text('{"model_type": "of another library"}')
    assert architecture_of(model, never) == published.architecture


def test_a_hub_id_is_looked_up_or_stands_for_its_family(home):
    warnings: list[str] = []
    schnell = flavours_of("flux")["schnell"]
    named = Model(model_family="flux", pretrained_model_name_or_path=schnell.hub)
    assert architecture_of(named, never) == schnell.architecture
    strange = Model(model_family="flux", model_flavour="schnell", pretrained_model_name_or_path="me/mine")
    assert architecture_of(strange, warnings.append) == schnell.architecture
    assert warnings == [f"me/mine is neither a folder nor in the local hub cache: this is {schnell.hub}, as published"]
    downloaded(home, "me/mine", SMALL)
    assert architecture_of(strange, never).config == SMALL


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "no model: set model_family"),
        ({"model_family": "fluks"}, "Unknown model_family 'fluks'; did you mean `flux`?"),
        ({"model_family": "flux", "model_flavour": "shnell"}, "did you mean `schnell`?"),
        ({"model_family": "mine", "model_families": {"mine": "a:B"}}, "mine is not known without a folder"),
        ({"pretrained_model_name_or_path": "./nowhere"}, "./nowhere is no folder"),
        ({"pretrained_model_name_or_path": "some/thing"}, "no model: set model_family"),
    ],
)
def test_what_cannot_be_meant_is_told(model, said):
    with pytest.raises(SettingsError) as error:
        architecture_of(Model(**model), never)
    assert said in error.value.message and error.value.hint


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"a": ', "cannot read"),
        ('["_class_name"]', "names no _class_name"),
        ('{"model_type": "t5"}', "names no _class_name"),
        ('{"_class_name": "NoSuchModel"}', "has no NoSuchModel"),
        ('{"_class_name": "FluxTransformer2DModel", "num_layers": "many"}', "cannot be built"),
        ('{"_class_name": "FluxTransformer2DModel", "num_attention_heads": -1}', "cannot be built"),
        ('{"_class_name": "FlowMatchEulerDiscreteScheduler"}', "is no model"),
    ],
)
def test_a_folder_that_cannot_tell_is_named(tmp_path, config, said):
    with pytest.raises(EnvironmentNotReady, match="holds neither transformer/config.json, nor unet/config.json"):
        detected(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(EnvironmentNotReady) as error:
        detected(tmp_path)
    assert said in error.value.message and error.value.hint


def test_an_answer_is_remembered_until_the_config_or_diffusers_changes(tmp_path):
    folder = pipeline(tmp_path / "p")
    first = detected(folder)
    assert not first.cached
    again = detected(folder)
    assert again.cached and again.as_json() == first.as_json() | {"cached": True}
    assert again.blocks == first.blocks
    assert not detected(folder, refresh=True).cached
    pipeline(folder, config=SMALL | {"num_layers": 4})
    changed = detected(folder)
    assert not changed.cached and changed.fingerprint != first.fingerprint
    assert detected(folder).blocks.total_parameters == changed.blocks.total_parameters > first.blocks.total_parameters
    assert [len(json.loads(path.read_text())) for path in block_cache_paths()[:1]] == [1]


def test_an_upgrade_of_diffusers_is_noticed(tmp_path, monkeypatch):
    folder = pipeline(tmp_path / "p")
    detected(folder)
    metadata = tmp_path / "site" / "diffusers-99.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert not detected(folder).cached


def test_an_entry_of_another_form_is_detected_anew(tmp_path):
    folder = pipeline(tmp_path / "p")
    detected(folder)
    path, _ = block_cache_paths()
    entries = json.loads(path.read_text())
    for damage in ({"classes": [{}]}, {"classes": 3}, {"recommended": None}, {"outside": 1}):
        path.write_text(json.dumps({key: entry | damage for key, entry in entries.items()}))
        assert not detected(folder).cached
    assert detected(folder).cached


def test_a_remembered_answer_needs_no_torch(tmp_path):
    folder = pipeline(tmp_path / "p")
    detected(folder)
    done = subprocess.run([sys.executable, "-c", CACHED, str(folder)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
