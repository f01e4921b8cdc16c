"""model_family=auto makes of a modular pipeline what the class of its plain pipeline makes of the same components."""

from __future__ import annotations

import pytest
from models.automatic.test_parity import expect_parity
from modular import as_modular

MODULAR = {
    "flux": "FluxModularPipeline",
    "sdxl": "StableDiffusionXLModularPipeline",
    "sd3": "StableDiffusion3ModularPipeline",
    "qwen_image": "QwenImageModularPipeline",
    "z_image": "ZImageModularPipeline",
}


@pytest.mark.parametrize("key", MODULAR)
def test_auto_trains_and_samples_by_blocks_as_the_class_does(key, pipelines, tmp_path):
    expect_parity(key, pipelines, as_modular(pipelines(key), tmp_path / "modular", MODULAR[key]))
