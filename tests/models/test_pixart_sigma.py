from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from models.test_inputs import CPU, expect_same_inputs, expect_same_picture, opened

from simpletuner.data.images.geometry import Geometry
from simpletuner.settings.values.shape import Shape


@pytest.fixture(scope="module")
def alpha(pipelines, tmp_path_factory) -> Path:
    """Return a pipeline as that of PixArt Alpha for 1024 px: its transformer is conditioned on sizes."""
    from diffusers import PixArtAlphaPipeline, PixArtTransformer2DModel
    from tiny_configs import tiny_config

    from simpletuner.models.tiny.build import fixed_seed

    folder = tmp_path_factory.mktemp("alpha")
    with fixed_seed():
        transformer = PixArtTransformer2DModel(
            **tiny_config("pixart_sigma", "transformer") | {"sample_size": 128, "use_additional_conditions": None}
        )
    PixArtAlphaPipeline.from_pretrained(pipelines("pixart_sigma"), transformer=transformer).save_pretrained(folder)
    return folder


def test_alpha_reads_120_tokens_and_is_given_sizes_as_its_pipeline_does(alpha):
    family = opened("pixart_sigma", alpha)
    assert family.max_length == 120
    expect_same_inputs(family)


def test_a_picture_of_alpha_is_the_one_that_its_pipeline_draws(alpha):
    expect_same_picture(opened("pixart_sigma", alpha))


def test_alpha_is_given_the_original_size_and_the_aspect_of_the_crop(alpha):
    geometry = Geometry(Shape(1, 1081, 1920), Shape(1, 721, 1280), (128, 7), Shape(1, 512, 1024))
    sizes = opened("pixart_sigma", alpha).size_conditioning(geometry)
    assert {name: (value.tolist(), value.dtype) for name, value in sizes.items()} == {
        "resolution": ([1081.0, 1920.0], torch.float32),
        "aspect_ratio": ([0.5], torch.float32),
    }


def test_sigma_reads_300_tokens_and_is_given_no_sizes(pipelines):
    family = opened("pixart_sigma", pipelines("pixart_sigma"))
    assert family.max_length == 300
    assert family.size_conditioning(Geometry(Shape(1, 9, 9), Shape(1, 9, 9), (0, 0), Shape(1, 8, 8))) == {}


def test_a_checkpoint_that_names_the_class_as_it_was_once_called_is_the_same(pipelines, tmp_path):
    folder = shutil.copytree(pipelines("pixart_sigma"), tmp_path / "old")
    for name, change in {
        "model_index.json": {"transformer": ["diffusers", "Transformer2DModel"]},
        "transformer/config.json": {"_class_name": "Transformer2DModel"},
    }.items():
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    family = opened("pixart_sigma", folder)
    assert type(family.denoiser()).__name__ == "PixArtTransformer2DModel"
    assert family.vae(CPU).cell == Shape(1, 4, 4)
    expect_same_picture(family)
