"""The shift of noise levels: that of the preset, of the settings, or what diffusers' own pipeline samples with."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.importing.original import DIFFUSION
from simpletuner.models.catalog.registry import TINY, presets, published_shift, tiny_architecture
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.objectives import FlowMatching, logit_normal, shifted
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.schedulers import describe_shift, sampling_shift
from simpletuner.settings import load
from simpletuner.settings.declared.errors import InvalidSettings
from simpletuner.settings.declared.sections import Model, ObjectiveSettings, Settings
from simpletuner.settings.values.shape import Shape

FLOWS = [key for key, preset in presets().items() if preset.has_class and preset.objective == "flow"]
DYNAMIC = {"use_dynamic_shifting": True, "base_image_seq_len": 8, "max_image_seq_len": 64}
DYNAMIC |= {"base_shift": 0.3, "max_shift": 1.3, "shift_terminal": None}


def opened(key: str, folder: Path, **objective: Any) -> ModelFamily:
    model = Model(model_family=key, pretrained_model_name_or_path=str(folder))
    settings = Settings(model=model, objective=ObjectiveSettings(**objective))
    return family_class(model).open(folder, settings)


def flow_of(family: ModelFamily) -> FlowMatching:
    objective = family.objective()
    assert isinstance(objective, FlowMatching)
    return objective


@pytest.mark.parametrize("key", FLOWS)
def test_the_preset_has_the_shift_with_which_the_scheduler_samples_1024_px(key, pipelines):
    family = opened(key, pipelines(key))
    preset = presets()[key]
    assert published_shift(Model(model_family=key, model_flavour=TINY)) == preset.flow_shift
    if key == "ltxvideo":  # 0.9.5's scheduler, which the tiny one is like, shifts nothing; 0.9.0's is dynamic
        family.scheduler_config |= {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05}
        family.scheduler_config["base_image_seq_len"] = 1024
    # By the width of the published model's latent cells; those of tiny VAEs are smaller.
    cells = 1024 // preset.cell_px
    assert sampling_shift(family)(Shape(1, cells, cells)) == pytest.approx(preset.flow_shift, rel=2e-4)
    shift = flow_of(family).shift
    assert (shift(Shape(1, cells, cells)) if callable(shift) else shift) == preset.flow_shift
    assert flow_of(opened(key, pipelines(key), flow_schedule_shift=2.5)).shift == 2.5


def test_flavours_whose_schedulers_differ_have_their_own():
    found = {
        (family, flavour): published_shift(Model(model_family=family, model_flavour=flavour))
        for family, flavour in (("flux", "schnell"), ("flux", "dev"), ("z_image", "base"), ("wan", "ti2v-5b-2.2"))
    }
    assert list(found.values()) == [1.0, 3.158, 6.0, 5.0]
    own = Model(model_family="flux", model_families={"flux": "package.module:Flux"})
    assert published_shift(own) == 0 and tiny_architecture(own.model_copy(update={"model_flavour": "tiny"})) is None
    assert all((presets()[key].flow_shift > 0) == (key in FLOWS) for key in presets() if presets()[key].has_class)


# Lumina2Pipeline counts the latents' channels in place of tokens, and SanaPipeline, WanPipeline, AuraFlowPipeline and
# LTXConditionPipeline give their schedulers no `mu`.
@pytest.mark.parametrize("key", ["flux", "flux2", "chroma", "qwen_image", "sd3", "z_image"])
def test_the_shift_by_size_is_what_diffusers_own_pipeline_gives_to_its_scheduler(key, pipelines):
    family = opened(key, pipelines(key), flow_schedule_auto_shift=True)
    family.scheduler_config |= DYNAMIC
    pipeline, shift = family.pipeline_class.from_pretrained(family.folder), flow_of(family).shift
    pipeline.scheduler = family.scheduler()
    pipeline.set_progress_bar_config(disable=True)
    assert callable(shift)
    given: list[float] = []
    set_timesteps = pipeline.scheduler.set_timesteps

    @functools.wraps(set_timesteps)  # pipelines look at its parameters
    def recorded(*values: Any, **named: Any) -> None:
        given.append(named["mu"])
        set_timesteps(*values, **named)

    pipeline.scheduler.set_timesteps = recorded
    vae = family.vae(torch.device("cpu"))
    # FLUX.2's `mu` depends on the number of steps, too, of which 50 are the default.
    steps = 50 if key == "flux2" else 2
    for shape in (Shape(1, 64, 96), Shape(1, 128, 128), Shape(1, 160, 64)):
        arguments = family.pipeline_kwargs({}, {}, SamplingParams(shape, steps, 1.0, seed=7))
        pipeline(prompt="a red circle", **arguments)
        assert shift(shape.in_cells(vae.cell)) == pytest.approx(math.exp(given[-1]))
    assert len(set(given)) == 3
    sigmas = torch.linspace(1, 0.02, 50)
    set_timesteps(sigmas=sigmas.tolist(), mu=given[-1])
    torch.testing.assert_close(pipeline.scheduler.sigmas[:-1], shifted(sigmas, math.exp(given[-1])))


def test_noise_levels_are_shifted_by_the_size_of_each_batch(pipelines):
    family = opened("flux", pipelines("flux"), flow_schedule_auto_shift=True)
    objective, u = flow_of(family), torch.tensor([0.2, 0.7])
    for height, width in ((32, 32), (128, 128)):
        latents = torch.zeros(2, 4, height, width)
        tokens = height * width // 4
        mu = 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)
        expected = shifted(logit_normal(u), math.exp(mu))
        torch.testing.assert_close(objective.add_noise(latents, latents, u).timesteps, expected)


def test_a_linear_shift_and_a_scheduler_without_one(pipelines):
    family = opened("flux", pipelines("flux"))
    family.scheduler_config |= DYNAMIC | {"time_shift_type": "linear"}
    assert sampling_shift(family)(Shape(1, 16, 16)) == pytest.approx(1.3)
    family = opened("sana", pipelines("sana"))
    del family.scheduler_config["flow_shift"]
    assert sampling_shift(family)(Shape(1, 16, 16)) == 1


@pytest.mark.parametrize("key", ["ltxvideo", "ltxvideo2"])
def test_clips_of_ltx_are_shifted_by_their_own_tokens(key, pipelines):
    """T102: of 121 frames of 768x512 px the levels that are sampled have a median of 0.94, that of an image is 0.72."""
    family = opened(key, pipelines(key))
    shift, cell = flow_of(family).shift, presets()[key].cell_px
    assert callable(shift)
    for frames, width, height, expected in (
        (1, 1024, 1024, 2.586),
        (1, 512, 512, 2.586),
        (49, 768, 512, 4.69),
        (97, 768, 512, 10.7),
        (121, 768, 512, 16.2),
        (121, 1216, 704, 215.0),
    ):
        cells = Shape(1 + (frames - 1) // 8, height // cell, width // cell)
        assert shift(cells) == pytest.approx(expected, rel=5e-3)
    if key == "ltxvideo2":
        cells = Shape(7, 16, 24)
        assert shift(cells) == sampling_shift(family)(cells)
    assert "(64x64@9 px)" in describe_shift(family, shift, [Shape(1, 64, 64), Shape(9, 64, 64)])
    assert flow_of(opened(key, pipelines(key), flow_schedule_shift=2.5)).shift == 2.5
    clip = torch.zeros(1, 4, 16, 16, 24)
    levels = flow_of(family).add_noise(clip, clip, torch.tensor([0.5])).timesteps
    torch.testing.assert_close(levels, shifted(torch.tensor([0.5]), shift(Shape(16, 16, 24))))


@pytest.mark.parametrize("key", [key for key in FLOWS if key not in ("wan", "ltxvideo2", "ideogram4")])
def test_auto_trains_at_the_noise_levels_of_the_class_of_its_pipeline(key, pipelines):
    """T112: FLUX by its class was trained at 3.158, and by auto at the shift of 64 px."""
    ours, auto = (flow_of(opened(name, pipelines(key))).shift for name in (key, "auto"))
    for shape in (Shape(1, 16, 16), Shape(1, 64, 64), Shape(3, 16, 16)):
        found, expected = (each(shape) if callable(each) else each for each in (auto, ours))
        assert found == expected
        if not presets()[key].frame_step:
            break


def test_a_constant_in_the_folder_is_taken_where_no_flavour_is_named(pipelines):
    """FLUX.1-schnell's is 1: the class trained its folder at dev's 3.158."""
    for key in ("flux", "auto"):
        family = opened(key, pipelines("flux"))
        assert describe_shift(family, 3.158, []) == "shifted by 3.158, as its scheduler samples 1024 px"
        for shift in (1.0, 1.7):
            family.scheduler_config |= {"use_dynamic_shifting": False, "shift": shift}
            assert flow_of(family).shift == shift


def test_two_shifts_are_refused_and_the_shift_of_the_family_is_explained():
    with pytest.raises(InvalidSettings, match=r"flow_schedule_shift = 3.0 is for all sizes"):
        load({"flow_schedule_auto_shift": True, "flow_schedule_shift": 3}, complete=False)
    assert set(DIFFUSION) == {key for key, preset in presets().items() if preset.is_diffusion}
    neutral = load({"flow_schedule_auto_shift": True, "flow_schedule_shift": 1}, complete=False)
    assert neutral.settings.objective.flow_schedule_auto_shift
