from __future__ import annotations

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from models.test_inputs import CPU, expect_same_inputs, expect_same_picture, opened
from tiny_configs import tiny_config

from simpletuner.models.families.flux import pack, position_ids, unpack
from simpletuner.settings.values.shape import Shape

SHAPES = [(1, 4, 2, 2), (2, 16, 8, 6), (3, 4, 6, 10)]


def numbered(shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Latents in which every number is different."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_latents_are_packed_as_the_pipeline_packs_them(shape):
    latents = numbered(shape)
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, *shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_undoes_packing_and_agrees_with_the_pipeline(shape):
    latents = numbered(shape)
    _, _, height, width = shape
    assert torch.equal(unpack(pack(latents), Shape(1, height, width)), latents)
    theirs = FluxPipeline._unpack_latents(pack(latents), height * 8, width * 8, vae_scale_factor=8)
    assert torch.equal(unpack(pack(latents), Shape(1, height, width)), theirs)


def test_a_token_holds_a_patch_with_channels_outermost():
    # two channels of 2x4: the first token is the left 2x2 patch of channel 0, then that of channel 1
    tokens = pack(numbered((1, 2, 2, 4)))
    assert tokens[0].tolist() == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


@pytest.mark.parametrize(("height", "width"), [(2, 2), (8, 6), (6, 10)])
def test_position_ids_are_those_of_the_pipeline(height, width):
    theirs = FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, torch.device("cpu"), torch.float32)
    assert torch.equal(position_ids(height, width, CPU), theirs)


def test_position_ids_name_row_and_column():
    assert position_ids(4, 4, CPU).tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]


def test_schnell_is_shown_256_tokens_of_text_and_no_guidance(flux, tmp_path):
    transformer = FluxTransformer2DModel(**(tiny_config("flux", "transformer") | {"guidance_embeds": False}))
    FluxPipeline.from_pretrained(flux, transformer=transformer).save_pretrained(tmp_path)
    family = opened("flux", tmp_path)
    assert family.max_length == 256
    expect_same_inputs(family, max_sequence_length=256)
    expect_same_picture(family, max_sequence_length=256)
