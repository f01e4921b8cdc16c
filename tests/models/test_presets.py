"""Every published architecture is what diffusers builds from it: no download is needed to look at a model."""

from __future__ import annotations

import json

import pytest
import torch

from simpletuner.models.catalog.preset import Architecture
from simpletuner.models.catalog.registry import flavours_of, heads_of, presets
from simpletuner.models.folder.diffusers_io import diffusers_class

ARCHITECTURES = {
    f"{key}/{name}": flavour.architecture
    for key in presets()
    for name, flavour in reversed(flavours_of(key).items())
    if flavour.architecture.parameters is not None
}
DISTINCT = {(a.class_name, json.dumps(a.config, sort_keys=True)): name for name, a in ARCHITECTURES.items()}


@pytest.mark.parametrize("name", DISTINCT.values())
def test_an_architecture_has_as_many_parameters_as_were_published(name):
    architecture: Architecture = ARCHITECTURES[name]
    with torch.device("meta"):
        model = diffusers_class(architecture.class_name)(**architecture.config)
    assert sum(parameter.numel() for parameter in model.parameters()) == architecture.parameters
    assert architecture.source.startswith("https://")
    if presets()[name.partition("/")[0]].heads:
        own = model.config.get("num_attention_heads") or model.config.n_heads
        assert heads_of(presets()[name.partition("/")[0]], architecture.config) == own


@pytest.mark.parametrize("key", [key for key, preset in presets().items() if preset.tiny and preset.flavours])
def test_the_miniature_is_of_the_published_class(key, pipelines):
    name = "unet" if (pipelines(key) / "unet").exists() else "transformer"
    config = json.loads((pipelines(key) / name / "config.json").read_text())
    assert config["_class_name"] in {flavour.architecture.class_name for flavour in flavours_of(key).values()}
