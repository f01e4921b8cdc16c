"""What our families show a denoiser equals what diffusers' own pipelines show it."""

from __future__ import annotations

import pytest
import torch

from simpletuner.data.geometry import Geometry
from simpletuner.models.registry import family_class
from simpletuner.settings.sections import Model, Objective, Settings


class Recorded(Exception):
    """Carries the first call of a denoiser out of a pipeline."""


def first_call(model: torch.nn.Module, action) -> dict[str, torch.Tensor]:
    """Return every tensor of the denoiser's first call by name, whatever way it was passed."""
    import inspect

    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def record(_, arguments, named):
        raise Recorded(dict(zip(names, arguments, strict=False)) | named)

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with pytest.raises(Recorded) as caught:
            action()
    finally:
        hook.remove()
    return flattened(caught.value.args[0])


def flattened(values: dict) -> dict[str, torch.Tensor]:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flattened(value)
        elif isinstance(value, torch.Tensor):
            flat[name] = value
    return flat


@pytest.mark.parametrize(("key", "guidance"), [("sdxl", 1.0), ("flux", 3.5)])
def test_a_denoiser_sees_what_diffusers_own_pipeline_shows_it(key, guidance, request):
    from diffusers import DiffusionPipeline

    folder = request.getfixturevalue(key)
    settings = Settings(model=Model(model_family=key), objective=Objective(flux_guidance_value=guidance))
    family = family_class(key)(folder, settings)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    denoiser = pipeline.unet if key == "sdxl" else pipeline.transformer
    latents = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(0))
    prompt, (width, height) = "a red circle", (24 * 4, 16 * 4)

    shown = {"latents": latents} if key == "sdxl" else {"generator": torch.Generator().manual_seed(3)}
    theirs = first_call(
        denoiser,
        lambda: pipeline(prompt, width=width, height=height, num_inference_steps=3, guidance_scale=guidance, **shown),
    )
    conditioning = dict(family.text_encoder(torch.device("cpu"), torch.float32).encode([prompt]))
    geometry = Geometry((width, height), (width, height), (0, 0), (width, height))
    conditioning |= {name: value[None] for name, value in family.picture_conditioning(geometry).items()}
    if key == "flux":
        from simpletuner.models.flux import unpacked

        latents, times = unpacked(theirs["hidden_states"], 16, 24), theirs["timestep"]
    else:
        latents, times = theirs["sample"], theirs["timestep"].expand(1)
    ours = first_call(denoiser, lambda: family.predict(denoiser, latents, times, conditioning))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name].float().squeeze(), value.float().squeeze(), atol=1e-5, rtol=1e-5, msg=name
        )


def test_sdxl_is_told_sizes_as_the_pipeline_orders_them(sdxl):
    family = family_class("sdxl")(sdxl, Settings(model=Model(model_family="sdxl")))
    ids = family.picture_conditioning(Geometry((1920, 1081), (1280, 721), (128, 7), (1024, 707)))["time_ids"]
    assert ids.dtype == torch.float32
    assert ids.tolist() == [1081, 1920, 7, 128, 707, 1024]


@pytest.mark.parametrize("key", ["sdxl", "flux"])
def test_no_caption_is_what_the_pipeline_uses_without_a_prompt(key, request):
    from diffusers import DiffusionPipeline

    folder = request.getfixturevalue(key)
    family = family_class(key)(folder, Settings(model=Model(model_family=key)))
    encoder = family.text_encoder(torch.device("cpu"), torch.float32)
    ours = family.unconditional(encoder.encode([""]))
    pipeline = DiffusionPipeline.from_pretrained(folder)
    if key == "sdxl":
        _, embeds, _, pooled = pipeline.encode_prompt("anything", do_classifier_free_guidance=True)
    else:
        embeds, pooled, _ = pipeline.encode_prompt("", None)
    torch.testing.assert_close(ours["prompt_embeds"], embeds)
    torch.testing.assert_close(ours["pooled"], pooled)
