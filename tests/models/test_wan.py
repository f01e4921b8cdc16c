from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from models import test_inputs
from models.test_inputs import CLIP, SHAPE, opened

from simpletuner.errors import SettingsError
from simpletuner.settings.values.shape import Shape

VAE_OF_2_2 = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "is_residual": True, "scale_factor_spatial": 16}


@pytest.fixture(scope="module")
def ti2v(pipelines, tmp_path_factory) -> Path:
    """Return a pipeline as that of Wan 2.2 TI2V-5B: a time for every token, a VAE of 16 px cells."""
    from diffusers import AutoencoderKLWan, WanPipeline
    from tiny_configs import tiny_config

    from simpletuner.models.tiny.build import fixed_seed

    folder = tmp_path_factory.mktemp("ti2v")
    with fixed_seed():
        vae = AutoencoderKLWan(**tiny_config("wan", "vae") | VAE_OF_2_2)
    WanPipeline.from_pretrained(pipelines("wan"), vae=vae, expand_timesteps=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", [SHAPE, CLIP])
def test_each_token_has_its_time_where_the_pipeline_says_so(ti2v, shape):
    assert opened("wan", ti2v).index["expand_timesteps"]
    test_inputs.test_a_denoiser_sees_what_diffusers_own_pipeline_shows_it("wan", shape, lambda _: ti2v)


def test_a_picture_of_ti2v_is_the_one_that_the_pipeline_draws(ti2v):
    assert opened("wan", ti2v).vae(test_inputs.CPU).cell == Shape(4, 16, 16)
    test_inputs.test_a_picture_is_the_one_that_diffusers_own_pipeline_draws("wan", CLIP, lambda _: ti2v)


@pytest.mark.parametrize("shape", [SHAPE, CLIP])
def test_latents_of_ti2v_come_back_as_the_vae_alone_would_bring_them(ti2v, shape):
    test_inputs.test_latents_come_back_as_the_vae_alone_would_bring_them("wan", shape, lambda _: ti2v)


def test_a_pipeline_of_two_denoisers_is_refused(pipelines, tmp_path):
    folder = shutil.copytree(pipelines("wan"), tmp_path / "wan2.2")
    index = json.loads((folder / "model_index.json").read_text())
    assert opened("wan", folder)
    index |= {"transformer_2": index["transformer"], "boundary_ratio": 0.875}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(SettingsError, match="two denoisers, transformer and transformer_2"):
        opened("wan", folder)
