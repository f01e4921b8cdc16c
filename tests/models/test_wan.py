from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import base
from models import test_inputs
from models.test_inputs import CLIP, SHAPE, opened, recorded_call
from safetensors.torch import load_file, save_file

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.catalog.registry import flavours_of
from simpletuner.models.opening.completeness import check_complete
from simpletuner.models.opening.published import open_without_weights
from simpletuner.settings.declared.sections import Model, Settings
from simpletuner.settings.values.shape import Shape

VAE_OF_2_2 = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "is_residual": True, "scale_factor_spatial": 16}
VAE_OF_2_2 |= {"base_dim": 8, "z_dim": 8, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}
VAE_OF_2_2 |= {"latents_mean": [0.1, 0.2, -0.1, 0.3] * 2, "latents_std": [0.12, 0.09, 0.11, 0.1] * 2}


@pytest.fixture(scope="module")
def ti2v(pipelines, tmp_path_factory) -> Path:
    """Return a pipeline as that of Wan 2.2 TI2V-5B: a time for every token, a VAE of 16 px cells."""
    from diffusers import AutoencoderKLWan, WanPipeline

    from simpletuner.models.tiny.build import fixed_seed

    folder = tmp_path_factory.mktemp("ti2v")
    with fixed_seed():
        vae = AutoencoderKLWan(**VAE_OF_2_2)
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


def test_plan_counts_a_time_for_each_token_and_both_denoisers_as_published(tmp_path):
    (times := tmp_path / "times").mkdir()
    settings = Settings(model=Model(model_family="wan", model_flavour="ti2v-5b-2.2"))
    family = open_without_weights(flavours_of("wan")["ti2v-5b-2.2"].architecture, settings, times)
    noised, text = torch.empty(1, 48, 5, 8, 12, device="meta"), torch.empty(1, 512, 4096, device="meta")
    model = family.meta_denoiser
    given = recorded_call(
        model, lambda: family.predict(model, noised, torch.empty(1, device="meta"), {"prompt_embeds": text})
    )
    assert given["timestep"].shape == (1, 5 * 4 * 6)
    (both := tmp_path / "both").mkdir()
    settings = Settings(model=Model(model_family="wan", model_flavour=LOW))
    family = open_without_weights(flavours_of("wan")[LOW].architecture, settings, both)
    assert (family.denoiser_name, family.other_denoiser) == ("transformer_2", "transformer")
    assert family.sigma_range == (0, BOUNDARY)


BOUNDARY = 0.875
HIGH, LOW = "t2v-14b-2.2-high", "t2v-14b-2.2-low"


@pytest.fixture(scope="module")
def a14b(pipelines, tmp_path_factory) -> Path:
    """Return a pipeline as that of Wan 2.2 A14B: a second denoiser, of other weights, below the boundary."""
    from diffusers import WanPipeline, WanTransformer3DModel
    from tiny_configs import tiny_config

    folder = tmp_path_factory.mktemp("a14b")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        second = WanTransformer3DModel(**tiny_config("wan", "transformer"))
    pipeline = WanPipeline.from_pretrained(pipelines("wan"), transformer_2=second, boundary_ratio=BOUNDARY)
    pipeline.save_pretrained(folder)
    return folder


def test_a_pipeline_of_two_denoisers_asks_which(a14b, pipelines):
    with pytest.raises(SettingsError, match="two denoisers, transformer and transformer_2") as refused:
        opened("wan", a14b)
    assert str(refused.value.hint) == f"choose one with model_flavour: {HIGH} or {LOW}"
    with pytest.raises(SettingsError, match=f"has no transformer_2, which model_flavour={LOW} trains"):
        opened("wan", pipelines("wan"), LOW)
    assert not opened("wan", pipelines("wan"), HIGH).other_denoiser  # one alone is the first


def test_two_denoisers_without_a_boundary_are_refused(a14b, tmp_path):
    folder = shutil.copytree(a14b, tmp_path / "unbound")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": None}))
    with pytest.raises(SettingsError, match="no boundary_ratio"):
        opened("wan", folder, HIGH)


@pytest.mark.parametrize(("flavour", "number", "step"), [(HIGH, 1, 0), (LOW, 2, 2)])
def test_each_of_two_denoisers_sees_what_the_pipeline_shows_it(a14b, flavour, number, step):
    # Of three steps the first is above the boundary: times 1000, 857 and 600.
    family = opened("wan", a14b, flavour)
    assert {family.denoiser_name, family.other_denoiser} == {"transformer", "transformer_2"}
    test_inputs.expect_same_inputs(family, CLIP, number=number, step=step)


@pytest.mark.parametrize("flavour", [HIGH, LOW])
def test_a_picture_is_drawn_by_both_denoisers(a14b, flavour):
    test_inputs.expect_same_picture(opened("wan", a14b, flavour), CLIP)


def test_the_denoiser_that_is_not_trained_must_be_complete(a14b, tmp_path):
    folder = shutil.copytree(a14b, tmp_path / "cut")
    check_complete(opened("wan", folder, LOW))
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    del tensors["proj_out.weight"]
    save_file(tensors, weights)
    with pytest.raises(EnvironmentNotReady, match="transformer lacks proj_out.weight"):
        check_complete(opened("wan", folder, LOW))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("flavour", [HIGH, LOW])
def test_noise_levels_are_those_of_all_of_which_the_denoiser_sees_a_part(a14b, flavour, uniform):
    part = replace(opened("wan", a14b, flavour).objective(), uniform=uniform)
    latents = torch.zeros(1, 1, 1, 1).expand(100_000, -1, -1, -1)
    u = torch.arange(0.5, len(latents)).double().div(len(latents))  # evenly, so that quantiles are exact
    whole = replace(part, sigma_range=(0.0, 1.0)).add_noise(latents, latents, u).timesteps
    drawn = part.add_noise(latents, latents, u).timesteps
    seen = whole[whole >= BOUNDARY] if flavour == HIGH else whole[whole < BOUNDARY]
    assert 0.05 < len(seen) / len(whole) < 0.95
    assert ((drawn >= BOUNDARY) if flavour == HIGH else (drawn <= BOUNDARY)).all()
    shares = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    torch.testing.assert_close(drawn.quantile(shares), seen.quantile(shares), atol=2e-4, rtol=0)
    ends = part.add_noise(latents[:2], latents[:2], torch.tensor([0.0, 1.0])).timesteps
    assert ends.min() >= part.sigma_range[0] and ends.max() <= part.sigma_range[1]


@pytest.mark.parametrize("flavour", [HIGH, LOW])
def test_one_of_two_denoisers_trains_resumes_draws_and_is_exported(a14b, flavour, shapes, train, tmp_path):
    from diffusers import WanPipeline

    trained, kept = ("transformer", "transformer_2") if flavour == HIGH else ("transformer_2", "transformer")
    flags = (
        *base("wan", a14b, shapes),
        f"--model_flavour={flavour}",
        "--aspect_bucket_alignment=32",
        f"--cache_dir_vae={tmp_path / 'latents'}",
        f"--cache_dir_text={tmp_path / 'text'}",
        *("--validation_prompt=a red circle", "--validation_num_inference_steps=3", "--validation_resolution=64"),
    )
    whole = train(tmp_path / "whole", *flags, "--max_train_steps=4")
    assert f"denoiser {trained}, for noise levels" in " ".join(whole.said.split())
    for steps in (2, 4):
        halves = train(tmp_path / "halves", *flags, f"--max_train_steps={steps}")
    assert halves.losses == whole.losses
    pipelines = [WanPipeline.from_pretrained(run.output / "pipeline") for run in (whole, halves)]
    before = WanPipeline.from_pretrained(a14b)
    for pipeline in pipelines:
        assert pipeline.config.boundary_ratio == BOUNDARY
        assert same_weights(getattr(pipeline, kept), getattr(before, kept))
        assert not same_weights(getattr(pipeline, trained), getattr(before, trained))
        assert same_weights(getattr(pipeline, trained), getattr(pipelines[0], trained))
    other = LOW if flavour == HIGH else HIGH
    refused = train(whole.output, *flags, f"--model_flavour={other}", "--max_train_steps=6", code=2)
    assert f"holds {trained} of the pipeline, but this run trains {kept}" in " ".join(refused.said.split())


@pytest.mark.parametrize("flavour", [HIGH, LOW])
def test_a_lora_of_one_of_two_denoisers_is_loaded_into_it(a14b, flavour, shapes, train, tmp_path):
    from diffusers import WanPipeline

    run = train(
        tmp_path / "run",
        *base("wan", a14b, shapes),
        f"--model_flavour={flavour}",
        "--aspect_bucket_alignment=32",
        *("--model_type=lora", "--lora_rank=4", "--max_train_steps=1"),
    )
    code = (run.output / "pipeline_lora_weights" / "README.md").read_text()
    call = next(line for line in code.splitlines() if "load_lora_weights" in line)
    pipeline = WanPipeline.from_pretrained(a14b)
    exec(call, {"pipeline": pipeline})
    trained, kept = ("transformer", "transformer_2") if flavour == HIGH else ("transformer_2", "transformer")
    assert pipeline.get_list_adapters().keys() == {trained}
    assert hasattr(getattr(pipeline, trained), "peft_config") and not hasattr(getattr(pipeline, kept), "peft_config")


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
