"""The architectures of tiny models, which the page and detection read without torch, are those that are built.

`python tests/models/test_tiny_architectures.py` writes them anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from simpletuner.models.architecture import architecture_in_folder, architecture_of
from simpletuner.models.parameter_count import parameters_of
from simpletuner.models.registry import TINY, TINY_ARCHITECTURES, family_class, load_preset, preset_names
from simpletuner.models.tiny.build import build_tiny
from simpletuner.settings.sections import Model


def families() -> list[str]:
    return [name for name in sorted(preset_names()) if class_of(name) and class_of(name).tiny_pipeline]


def class_of(family: str) -> Any:
    preset = load_preset(family)
    return family_class(Model(model_family=family)) if preset and preset.family_class else None


def built(folder: Path) -> dict[str, Any]:
    """Return the entry of a tiny pipeline's folder, without what each version of diffusers writes."""
    architecture = architecture_in_folder(folder)
    config = {name: value for name, value in architecture.config.items() if not name.startswith("_")}
    count = parameters_of(Model(pretrained_model_name_or_path=str(folder)))
    return {"class_name": architecture.class_name, "parameters": count and count[0], "config": config}


@pytest.mark.parametrize("family", families())
def test_a_tiny_model_is_known_without_building_it(family: str, tmp_path: Path):
    model = Model(model_family=family, model_flavour=TINY)
    build_tiny(class_of(family), tmp_path)
    known, expected = architecture_of(model, pytest.fail), built(tmp_path)
    assert {"class_name": known.class_name, "parameters": known.parameters, "config": dict(known.config)} == expected
    assert parameters_of(model) == (expected["parameters"], f"of the tiny {family}")


def write() -> None:
    entries = {}
    for family in families():
        with tempfile.TemporaryDirectory() as folder:
            build_tiny(class_of(family), Path(folder))
            entries[family] = built(Path(folder))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in entries.items())
    TINY_ARCHITECTURES.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    sys.exit(write())
