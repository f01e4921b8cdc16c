"""The architectures of tiny models, which the page and detection read without torch, are those that are built."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
from accelerate import init_empty_weights

from simpletuner.models.catalog.architecture import architecture_in_folder, architecture_of, parameters_of
from simpletuner.models.catalog.registry import TINY, presets
from simpletuner.models.tiny.build import build_tiny
from simpletuner.settings.declared.sections import Model


@pytest.mark.parametrize("family", [name for name, preset in presets().items() if preset.tiny])
def test_a_tiny_model_is_known_without_building_it(family: str, tmp_path: Path):
    model = Model(model_family=family, model_flavour=TINY)
    build_tiny(model, tmp_path)
    known, built = architecture_of(model, pytest.fail), architecture_in_folder(tmp_path)
    assert known.class_name == built.class_name
    cls = getattr(diffusers, known.class_name)
    with init_empty_weights():
        whole = json.loads(cls(**known.config).to_json_string())
    assert whole == {name: value for name, value in built.config.items() if name != "_name_or_path"}
    count = parameters_of(Model(pretrained_model_name_or_path=str(tmp_path)))
    assert count is not None and parameters_of(model) == (count[0], f"of the tiny {family}")


def test_every_family_that_trains_has_a_tiny_flavour_but_the_one_whose_tokenizer_is_a_file():
    assert {name for name, preset in presets().items() if preset.family_class and not preset.tiny} == {"kolors"}
