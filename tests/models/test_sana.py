from __future__ import annotations

from pathlib import Path

import pytest
from models.test_inputs import expect_same_inputs, expect_same_picture, opened


@pytest.fixture(scope="module")
def older(pipelines, tmp_path_factory) -> Path:
    """Return a pipeline as of Sana 1.0 (queries and keys as they are), for 2K (positions), with Euler's scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
    from tiny_configs import tiny_config

    from simpletuner.models.tiny.build import fixed_seed

    folder = tmp_path_factory.mktemp("older")
    with fixed_seed():
        transformer = SanaTransformer2DModel(
            **tiny_config("sana", "transformer")
            | {"qk_norm": None, "interpolation_scale": 1.0, "timestep_scale": 0.001}
        )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    SanaPipeline.from_pretrained(pipelines("sana"), transformer=transformer, scheduler=scheduler).save_pretrained(
        folder
    )
    return folder


def test_sana_1_0_sees_what_its_pipeline_shows_it_and_time_as_its_config_scales_it(older):
    expect_same_inputs(opened("sana", older))


def test_a_picture_of_sana_1_0_is_the_one_that_its_pipeline_draws(older):
    expect_same_picture(opened("sana", older))
