from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import test_inputs
from models.test_inputs import (
    CLIP,
    CPU,
    PROMPT,
    SHAPE,
    diffusers_pipeline,
    latents_shown,
    opened,
    recorded_call,
    sampling,
)

from simpletuner.models.families.ltxvideo import video_coords
from simpletuner.models.family.vae import cell_of
from simpletuner.settings.values.shape import Shape

VAE_OF_0_9_0 = {
    "latent_channels": 8,
    "block_out_channels": [16, 32],
    "down_block_types": ["LTXVideoDownBlock3D"] * 2,
    "layers_per_block": [1, 1, 1],
    "spatio_temporal_scaling": [True, False],
    "decoder_block_out_channels": [16, 32],
    "decoder_layers_per_block": [1, 1, 1],
    "decoder_spatio_temporal_scaling": [True, False],
    "decoder_inject_noise": [False] * 3,
}
SCHEDULER_OF_0_9_0 = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}


def save_0_9_0(base: Path, folder: Path) -> Path:
    """Make a pipeline as that of 0.9.0: an LTXPipeline, a VAE without a timestep, a scheduler with a shift."""
    from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline

    from simpletuner.models.tiny.build import fixed_seed

    with fixed_seed():
        vae = AutoencoderKLLTXVideo(**VAE_OF_0_9_0)
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER_OF_0_9_0)
    LTXPipeline.from_pretrained(base, vae=vae, scheduler=scheduler).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def first(pipelines, tmp_path_factory) -> Path:
    return save_0_9_0(pipelines("ltxvideo"), tmp_path_factory.mktemp("ltx-0.9.0"))


@pytest.mark.parametrize("shape", [SHAPE, CLIP])
def test_the_denoiser_predicts_as_for_ltxpipeline_which_gives_positions_in_another_form(first, shape):
    family = opened("ltxvideo", first)
    pipeline = diffusers_pipeline(family)
    asked = family.pipeline_kwargs({}, {}, sampling(guidance=1.0, shape=shape))
    theirs = recorded_call(pipeline.transformer, lambda: pipeline(prompt=PROMPT, **asked), number=2)
    assert theirs["rope_interpolation_scale"][1:] == (8, 8)

    conditioning = family.text_encoder(CPU, torch.float32).encode([PROMPT])
    noisy = latents_shown(family, theirs, shape)
    with torch.no_grad():
        answer = pipeline.transformer(**theirs, return_dict=False)[0]
        ours = family.predict(pipeline.transformer, noisy, theirs["timestep"] / 1000, conditioning)
    answer = family.unpack_latents(answer, Shape.of_axes(noisy.shape[2:]))
    torch.testing.assert_close(ours, answer, atol=1e-5, rtol=1e-5)


def test_a_picture_of_ltxpipeline_is_the_one_that_it_draws(first):
    test_inputs.test_a_picture_is_the_one_that_diffusers_own_pipeline_draws("ltxvideo", CLIP, lambda _: first)


def test_the_scheduler_of_0_9_0_brings_back_clean_latents(first):
    test_inputs.test_the_scheduler_s_step_brings_back_clean_latents_from_the_target("ltxvideo", lambda _: first)


@pytest.mark.parametrize("shape", [SHAPE, CLIP])
def test_latents_of_a_vae_without_a_timestep_come_back(first, shape):
    test_inputs.test_latents_come_back_as_the_vae_alone_would_bring_them("ltxvideo", shape, lambda _: first)


def test_a_cell_is_as_wide_as_the_vae_says(pipelines, first):
    for folder in (pipelines("ltxvideo"), first):
        family = opened("ltxvideo", folder)
        assert family.cell == family.vae(CPU).cell == Shape(2, 8, 8)
    family.vae_config |= {"patch_size": 4, "spatio_temporal_scaling": [True, True, True, False]}
    family.vae_config |= {"spatial_compression_ratio": None, "temporal_compression_ratio": None}
    assert cell_of(family.vae_config) == Shape(8, 32, 32)


def test_prompts_are_as_long_as_the_pipeline_takes_them(pipelines, first):
    assert opened("ltxvideo", pipelines("ltxvideo")).max_length == 256
    assert opened("ltxvideo", first).max_length == 128


def test_coords_are_second_top_and_left():
    places = [[0, 0, 0, 32, 32, 32], [0, 32, 64, 0, 32, 64]]
    assert video_coords(Shape(1, 2, 3), Shape(8, 32, 32), True, CPU).tolist() == [[0] * 6, *places]
