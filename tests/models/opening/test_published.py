"""Published models that are opened without their weights, as by `plan`, are of their own pipeline, not the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simpletuner.counting.step_memory import Workload, estimate_training
from simpletuner.models.catalog.registry import flavours_of
from simpletuner.models.opening.published import open_without_weights
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.values.shape import SampleShape, Shape


@pytest.mark.parametrize(
    ("family", "flavour", "pipeline"),
    [
        ("flux", "dev", "FluxPipeline"),
        ("flux", "kontext", "FluxKontextPipeline"),
        ("flux2", "klein-4b", "Flux2KleinPipeline"),
        ("flux2", "dev", "Flux2Pipeline"),
        ("qwen_image", "v1.0", "QwenImagePipeline"),
        ("qwen_image", "edit-v1", "QwenImageEditPipeline"),
        ("qwen_image", "edit-v2", "QwenImageEditPlusPipeline"),
        ("qwen_image", "edit-v3", "QwenImageEditPlusPipeline"),
        ("wan", "i2v-14b-2.1", "WanImageToVideoPipeline"),
    ],
)
def test_a_flavour_is_of_its_own_pipeline(family, flavour, pipeline, tmp_path):
    settings = Settings(model=Model(model_family=family, model_flavour=flavour))
    opened = open_without_weights(flavours_of(family)[flavour].architecture, settings, tmp_path)
    assert opened.pipeline_class.__name__ == pipeline


def test_references_are_counted(tmp_path):
    settings = Settings(model=Model(model_family="flux", model_flavour="kontext", model_type="lora"))
    published = flavours_of("flux")["kontext"].architecture
    few_blocks = {"num_layers": 2, "num_single_layers": 4}  # of 19 and 38: what they hold is counted per block
    family = open_without_weights(replace(published, config=published.config | few_blocks), settings, tmp_path)
    image = Shape(1, 512, 512)
    alone, paired = (
        sum(row.gpu for row in estimate_training(settings, Workload(family, shape)).rows if row.name == "activations")
        for shape in (SampleShape(image), SampleShape(image, (image,)))
    )
    assert paired > 1.4 * alone


@pytest.mark.parametrize(("name", "step"), [("wan", 4), ("ltxvideo", 8)])
def test_clips_have_as_many_latent_frames_as_a_run_trains_on(name, step, tmp_path):
    """Every frame was one of the latents: plan said 7 times the time, and refused clips that fit."""
    flavour = next(iter(flavours_of(name)))
    settings = Settings(model=Model(model_family=name, model_flavour=flavour))
    family = open_without_weights(flavours_of(name)[flavour].architecture, settings, tmp_path)
    assert flavour != "tiny" and family.cell.frames == step
    assert Shape(4 * step + 1, 256, 256).in_cells(family.cell).axes[0] == 5
