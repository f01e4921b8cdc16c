"""model_family=auto trains video pipelines without a class on clips and images, and refuses what it gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from foreign import build_foreign
from models.automatic.test_parity import TOKENS, automatic
from models.automatic.test_planning import counted
from models.automatic.test_refusals import ADVICE, opened_as, planted
from models.test_inputs import CPU, PROMPT, diffusers_pipeline

from simpletuner.counting.step_trace import trace_vae
from simpletuner.data.prefetch import stack_conditioning
from simpletuner.errors import SettingsError
from simpletuner.models.automatic.family import SMALLEST, AutomaticFamily
from simpletuner.models.automatic.hooks import ALWAYS, FRAMES
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.folder.diffusers_io import build_on_meta
from simpletuner.preparation.plan import step_of_vae
from simpletuner.settings.declared.sections import Model
from simpletuner.settings.values.shape import Shape

STEPS = {
    "HunyuanVideoPipeline": 4,
    "HunyuanVideo15Pipeline": 4,
    "MochiPipeline": 6,
    "Kandinsky5T2VPipeline": 4,
    "SanaVideoPipeline": 4,
    "CogVideoXPipeline": 8,
}
"""Frames from one length of clips to the next."""

UNCOUNTED = "MochiPipeline"
"""Its denoiser asks for autocast, which the meta device has not."""


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # Mochi's pipeline asks for it
@pytest.mark.parametrize("name", STEPS)
def test_a_video_pipeline_is_proven_on_clips_and_images_and_samples_what_diffusers_does(name, tmp_path, monkeypatch):
    monkeypatch.setattr(HunyuanVideo15Pipeline, "__init__", with_short_captions(HunyuanVideo15Pipeline.__init__))
    folder, clip = build_foreign(name, tmp_path / "base"), SMALLEST._replace(frames=1 + STEPS[name])
    assert step_of_vae(Model(model_family="auto", pretrained_model_name_or_path=str(folder))) == STEPS[name]
    family = automatic(folder, SMALLEST, clip)
    assert [check.finding.endswith(f", {clip}") for check in family.checks if check.name == "own loop"] == [True, False]
    pixels = torch.rand(1, 3, *clip.axes, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = (vae := family.vae(CPU)).encode(pixels)
    assert latents.shape[1:] == family.input_shapes(clip)["latents"] and vae.decode(latents).shape == pixels.shape
    if name != UNCOUNTED:
        assert counted(family, clip) > counted(family, SMALLEST)
    theirs = expect_same_samples(family, clip)
    assert abs(theirs[:, :, 0] - theirs[:, :, -1]).max() > 1e-3


def with_short_captions(init: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` of HunyuanVideo 1.5 that pads less: to 1,985 tokens beside those of a clip by itself."""

    @wraps(init)  # diffusers reads its parameters
    def shorter(pipeline: Any, *args: object, **kwargs: object) -> None:
        init(pipeline, *args, **kwargs)
        pipeline.tokenizer_max_length = pipeline.tokenizer_2_max_length = TOKENS
        pipeline.vision_num_semantic_tokens = 9

    return shorter


def expect_same_samples(family: AutomaticFamily, shape: Shape) -> torch.Tensor:
    """Compare predictions for two samples with those for one, and a sample with that of diffusers' own pipeline."""
    vae, denoiser = family.vae(CPU), getattr(pipeline := diffusers_pipeline(family), family.denoiser_name)
    text = family.text_encoder(CPU, torch.float32).encode([PROMPT])
    both = stack_conditioning([{key: value[0] for key, value in text.items()}] * 2)
    noised = torch.randn(2, *family.input_shapes(shape)["latents"], generator=torch.Generator().manual_seed(1))
    times = family.found.schedule.timesteps(0.2, 0.8)
    predicted = family.predict(denoiser, noised, times, both)
    torch.testing.assert_close(
        family.predict(denoiser, noised[1:], times[1:], text), predicted[1:], atol=1e-4, rtol=1e-4
    )

    ours = vae.decode(family.sample(denoiser, vae, SamplingParams(shape, 2, 1.0, seed=7), text, text)) / 2 + 0.5
    known = family.predictor(CPU).hooked.parameters
    given = dict.fromkeys(FRAMES, shape.frames) | ALWAYS | family.found.arguments | {"use_kv_cache": True}
    given |= {"width": 64, "height": 64, "num_inference_steps": 2, "generator": torch.Generator().manual_seed(7)}
    if guider := getattr(pipeline, "guider", None):
        guider.disable()
    theirs = pipeline(PROMPT, output_type="pt", **{key: each for key, each in given.items() if key in known})[0]
    theirs = theirs.float().transpose(1, 2) if theirs.ndim == 5 else theirs[:, :3]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert theirs.std() > 0.01
    return theirs


def test_qwen_image_21_whose_vae_takes_clips_of_one_frame_with_an_opacity_is_trained(tmp_path):
    family = automatic(build_foreign("QwenImage21Pipeline", tmp_path / "base"))
    # Its own loop keeps keys and values of the text, so a sample shows that training without them is the same.
    expect_same_samples(family, SMALLEST)
    assert trace_vae(build_on_meta(family.vae_config), torch.float32, SMALLEST, 1, decodes=False) > 0


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("num_frames = max(num_frames, 1)", "num_frames = 5", "it does not keep to the frames it is asked for"),
        ("decode(latents, return_dict=False)[0]", "decode(latents, return_dict=False)[0][:, :, 1:]", "is 64x64@8 px"),
        ("prompt=prompt,\n", "prompt=[f'{each} {num_frames}' for each in prompt],\n", "depends on the size, or on the"),
    ],
)
def test_a_fault_that_only_clips_show_is_refused(old, new, sentence, pipelines):
    from diffusers import WanPipeline

    family = opened_as(planted(WanPipeline, old, new), pipelines("wan"))
    with pytest.raises(SettingsError) as refusal:
        family.prove([SMALLEST._replace(frames=9)], CPU)
    assert sentence in refusal.value.message and refusal.value.hint == ADVICE


def test_clips_that_a_pipeline_does_not_make_are_refused(flux, pipelines, tmp_path):
    with pytest.raises(SettingsError, match="none of num_frames, frames, video_length, so it makes no clips"):
        automatic(flux, SMALLEST._replace(frames=5))
    wan = automatic(pipelines("wan"), proven=False)
    with pytest.raises(SettingsError, match="its VAE makes 5 frames of a clip of 7"):
        wan.prove([Shape(7, 64, 64)], CPU)
    with pytest.raises(SettingsError, match="its clips have a multiple of 4 and one more frame, not 7"):
        wan.prove([SMALLEST._replace(frames=5), Shape(7, 64, 64)], CPU)
    with pytest.raises(SettingsError, match="WanPipeline does not sample 64x64@6 px: its clips have") as refusal:
        wan.prove([SMALLEST], CPU, [SMALLEST._replace(frames=6)])
    assert "validation_num_video_frames" in str(refusal.value.hint)
    # Its denoiser takes pairs of latent frames, so one frame becomes five.
    pairs = build_foreign("CogVideoXPipeline", tmp_path / "pairs", transformer={"patch_size_t": 2})
    with pytest.raises(SettingsError, match="it does not keep to the frames it is asked for: it draws noise of shape"):
        automatic(pairs, SMALLEST)
