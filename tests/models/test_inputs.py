"""Every family gives its denoiser, and samples, what diffusers' own pipeline does; its target brings latents back.

Nothing here names a family: a new preset is tested by being there.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from flags import tokens_of
from PIL.Image import Image
from torch.overrides import TorchFunctionMode

from simpletuner.caches.store.records import parse_tensors, serialize
from simpletuner.caches.texts import without_padding
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import named_references, stack_conditioning
from simpletuner.models.catalog.registry import presets
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.objectives import FlowMatching
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.vae import pixels_of
from simpletuner.parallel.model.attention_backend import fuse_qkv
from simpletuner.settings.declared.sections import Data, Model, Settings, Training
from simpletuner.settings.values.shape import Shape

BY_CLASS = [key for key, preset in presets().items() if preset.has_class]
PROMPT, STEPS, CPU = "a red circle", 3, torch.device("cpu")
OF_CLIPS = [key for key in BY_CLASS if presets()[key].frame_step]
SHAPE, CLIP = Shape(1, height=64, width=96), Shape(17, height=64, width=96)
"""Width and height in px, different from one another and from a multiple of no family's cell."""
SHAPES = [*((key, SHAPE) for key in BY_CLASS), *((key, CLIP) for key in OF_CLIPS)]
WITH_OTHERS = [key for key in BY_CLASS if family_class(Model(model_family=key)).unused_inputs]
"""Families whose denoiser also has inputs without meaning in training: their modules compare the others."""


def opened(key: str, folder: Path, flavour: str = "", tokens: int | None = None) -> ModelFamily:
    model = Model(model_family=key, model_flavour=flavour)
    return family_class(model).open(folder, Settings(model=model, data=Data(tokenizer_max_length=tokens)))


def opened_for_short_captions(key: str, folder: Path, tokens: int = 24) -> ModelFamily:
    """Captions padded to few tokens: with 512, what is computed in bf16 on a CPU takes eight times as long."""
    return opened(key, folder, tokens=tokens if tokens_of(key) else None)


def diffusers_pipeline(family: ModelFamily) -> Any:
    """Return the whole pipeline as a user of diffusers opens it."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(family.folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def diffusers_denoiser(family: ModelFamily) -> torch.nn.Module:
    """Return the denoiser of that pipeline alone, which opens in a third of the time."""
    import diffusers

    return getattr(diffusers, family.config["_class_name"]).from_pretrained(family.folder / family.denoiser_name)


class Recorded(Exception):
    """Carries a call of a denoiser out of a pipeline."""


def recorded_call(model: torch.nn.Module, action, number: int = 1) -> dict[str, Any]:
    """Return all that the denoiser is given at its n-th call, by name, whatever way it was passed."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    calls = []

    def record(_, arguments, named):
        calls.append(dict(zip(names, arguments, strict=False)) | named)
        if len(calls) == number:
            raise Recorded

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with pytest.raises(Recorded), torch.no_grad():
            action()
    finally:
        hook.remove()
    return flattened(calls[-1])


def flattened(given: dict[str, Any]) -> dict[str, Any]:
    """Return what was given without nesting; an option that is None is one that was not given."""
    flat = {}
    for name, value in given.items():
        if isinstance(value, dict):
            flat |= flattened(value)
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            flat |= {f"{name}[{number}]": each for number, each in enumerate(value)}
        elif value is not None and name != "return_dict":
            flat[name] = value
    return flat


def latents_shown(family: ModelFamily, given: dict[str, Any], shape: Shape) -> torch.Tensor:
    """Return the latents (1CHW) that a pipeline gave its denoiser, as the VAE made them."""
    latents = next(given[name] for name in ("sample", "hidden_states", "x[0]") if name in given)
    latents = latents.transpose(0, 1) if "x[0]" in given else latents  # one of a list is CFHW, a video of one frame
    cells = shape.in_cells(family.vae(CPU).cell)
    if family.most_references:  # whose tokens follow
        latents = latents[:, : family.image_tokens(cells)]
    return family.unpack_latents(latents, cells)


def given(references: tuple[Image, ...]) -> dict[str, Any]:
    one = references[0] if len(references) == 1 else list(references)
    return {"image": one} if references else {}


def same(ours: Any, theirs: Any, name: str) -> None:
    """Expect one input to be equal, but for a batch axis of one."""
    if isinstance(theirs, torch.Tensor):
        ours = torch.as_tensor(ours)
        torch.testing.assert_close(ours.float().squeeze(), theirs.float().squeeze(), atol=1e-5, rtol=1e-5, msg=name)
    else:
        assert ours == theirs, name


# Ideogram4Pipeline puts 2,048 tokens before an image, most of them padding: test_ideogram4.py has a text without any.
@pytest.mark.parametrize(("key", "shape"), [each for each in SHAPES if each[0] not in (*WITH_OTHERS, "ideogram4")])
def test_a_denoiser_sees_what_diffusers_own_pipeline_shows_it(key, shape, pipelines):
    expect_same_inputs(opened(key, pipelines(key)), shape)


def expect_same_inputs(
    family: ModelFamily,
    shape: Shape = SHAPE,
    references: tuple[Image, ...] = (),
    *,
    number: int = 2,
    step: int = 1,
    **kwargs: Any,
) -> None:
    """Compare the second call of three, or another one and its step; the pipeline also gets these arguments."""
    pipeline = diffusers_pipeline(family)
    denoiser = getattr(pipeline, family.denoiser_name)
    params = sampling(1.0, shape, references)
    arguments = family.pipeline_kwargs({}, {}, params) | given(references) | kwargs
    theirs = recorded_call(denoiser, lambda: pipeline(prompt=PROMPT, **arguments), number)

    read = references if family.reads_references else ()
    conditioning = family.text_encoder(CPU, torch.float32).encode([PROMPT], read)
    geometry = Geometry(SHAPE, SHAPE, (0, 0), SHAPE)
    conditioning |= {name: value[None] for name, value in family.size_conditioning(geometry).items()}
    scheduler = pipeline.scheduler
    flow = isinstance(family.objective(), FlowMatching)
    times = scheduler.timesteps[step : step + 1] / (scheduler.config.num_train_timesteps if flow else 1)
    conditioning |= named_references(family.vae(CPU).encode(pixels_of(each)) for each in references)
    noised = latents_shown(family, theirs, shape)
    assert noised.ndim == 2 + len(shape.axes)
    ours = recorded_call(denoiser, lambda: family.predict(denoiser, noised, times, conditioning))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name in family.unused_inputs:
            assert ours[name].shape == value.shape
        else:
            same(ours[name], value, name)


def sampling(guidance: float, shape: Shape = SHAPE, references: tuple[Image, ...] = ()) -> SamplingParams:
    return SamplingParams(shape, STEPS, guidance, seed=7, references=references)


class Products(TorchFunctionMode):
    """Count the linear layers that run."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("key", BY_CLASS)
def test_neither_checkpointing_nor_fused_projections_change_prediction_or_gradients(key, pipelines):
    family = opened_for_short_captions(key, pipelines(key))
    denoiser = diffusers_denoiser(family)
    conditioning = family.text_encoder(CPU, torch.float32).encode([PROMPT])
    geometry = Geometry(SHAPE, SHAPE, (0, 0), SHAPE)
    conditioning |= {name: value[None] for name, value in family.size_conditioning(geometry).items()}
    clean = family.vae(CPU).encode(torch.zeros(1, 3, *SHAPE[1:]))
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    example = family.objective().add_noise(clean, noise, torch.full((1,), 0.5))

    def predict() -> list[torch.Tensor]:
        predicted = family.predict(denoiser, example.x_t, example.timesteps, conditioning)
        predicted.square().mean().backward()
        gradients = [parameter.grad for parameter in denoiser.parameters() if parameter.grad is not None]
        denoiser.zero_grad()
        return [predicted.detach(), *gradients]

    kept = predict()
    denoiser.enable_gradient_checkpointing()
    torch.testing.assert_close(predict(), kept)
    if family.fuses_qkv:
        with Products() as apart:
            predict()
        names = list(denoiser.state_dict())
        fuse_qkv(denoiser)
        with Products() as fused:
            torch.testing.assert_close(predict(), kept)
        assert fused.count < apart.count and list(denoiser.state_dict()) == names


@pytest.mark.parametrize(("key", "shape"), SHAPES)
def test_a_picture_is_the_one_that_diffusers_own_pipeline_draws(key, shape, pipelines):
    expect_same_picture(opened(key, pipelines(key)), shape)


def expect_same_picture(
    family: ModelFamily, shape: Shape = SHAPE, references: tuple[Image, ...] = (), **kwargs: Any
) -> None:
    """Compare sampling as a whole, with guidance; the pipeline also gets these arguments."""
    pipeline, vae, params = diffusers_pipeline(family), family.vae(CPU), sampling(4.0, shape, references)
    arguments = family.pipeline_kwargs({}, {}, params) | given(references) | kwargs
    if "true_cfg_scale" in arguments:  # such a pipeline guides only if there is a negative prompt
        arguments["negative_prompt"] = ""
    theirs = pipeline(prompt=PROMPT, **(arguments | {"output_type": "pt"}))[0]
    theirs = theirs.transpose(1, 2) if theirs.ndim == 5 else theirs  # BFCHW of a video
    theirs = theirs[:, :, 0] if theirs.ndim == 5 and shape.frames == 1 else theirs

    encoder = family.text_encoder(CPU, torch.float32)
    read = references if family.reads_references else ()
    no_caption = family.unconditional(encoder.encode([""], read))
    denoiser = getattr(pipeline, family.denoiser_name)
    with torch.no_grad():
        latents = family.sample(denoiser, vae, params, encoder.encode([PROMPT], read), no_caption)
    ours = (vae.decode(latents) + 1) / 2
    assert ours.shape == theirs.shape
    assert float(theirs.std()) > 0.01, "a picture of one colour proves nothing"
    torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("key", BY_CLASS)
def test_the_scheduler_s_step_brings_back_clean_latents_from_the_target(key, pipelines):
    family = opened(key, pipelines(key))
    family.settings = Settings(model=family.settings.model, training=Training(mixed_precision="no"))
    objective, scheduler = family.objective(), family.load_pipeline(vae=None).scheduler
    dynamic = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(STEPS, **dynamic)
    clean, noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind()
    time = scheduler.timesteps[-1:]
    if isinstance(objective, FlowMatching):
        sigma = scheduler.sigmas[STEPS - 1]
        example = objective.at(clean, noise, sigma[None])
    else:
        example = objective.at(clean, noise, time.long())
    scheduler.set_begin_index(STEPS - 1)
    mixed = scheduler.scale_noise if hasattr(scheduler, "scale_noise") else scheduler.add_noise
    arguments = (clean, time, noise) if hasattr(scheduler, "scale_noise") else (clean, noise, time)
    sample = mixed(*arguments)
    shown = scheduler.scale_model_input(sample, time[0]) if hasattr(scheduler, "scale_model_input") else sample
    torch.testing.assert_close(shown, example.x_t, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scheduler.step(example.target, time[0], sample).prev_sample, clean, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("key", "shape"), SHAPES)
def test_latents_come_back_as_the_vae_alone_would_bring_them(key, shape, pipelines):
    vae = opened(key, pipelines(key)).vae(CPU)
    pixels = torch.rand(2, 3, *shape.axes, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = vae.encode(pixels)
    assert latents.shape[0] == 2 and latents.shape[2:] == shape.in_cells(vae.cell).axes
    assert vae.decode(latents).shape == pixels.shape
    is_image = vae.has_frames and shape.frames == 1
    with torch.no_grad():
        frames = pixels.unsqueeze(2) if is_image else pixels
        encoded = vae.model.encode(frames)
        raw = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
        clean = {"temb": torch.zeros(2)} if vae.model.config.get("timestep_conditioning") else {}
        alone = vae.model.decode(raw, **clean).sample
    alone = (alone.squeeze(2) if is_image else alone).clamp(-1, 1)
    torch.testing.assert_close(vae.decode(latents), alone, atol=1e-4, rtol=0)


def test_sdxl_is_given_sizes_as_the_pipeline_orders_them(sdxl):
    geometry = Geometry(Shape(1, 1081, 1920), Shape(1, 721, 1280), (128, 7), Shape(1, 707, 1024))
    ids = opened("sdxl", sdxl).size_conditioning(geometry)["time_ids"]
    assert ids.dtype == torch.float32
    assert ids.tolist() == [1081, 1920, 7, 128, 707, 1024]


@pytest.mark.parametrize("key", BY_CLASS)
def test_padding_that_is_not_cached_changes_no_bit_of_a_prediction(key, pipelines):
    family = opened_for_short_captions(key, pipelines(key))
    denoiser = diffusers_denoiser(family)
    encoded = family.text_encoder(CPU, torch.float32).encode([PROMPT, f"{PROMPT}, and {PROMPT} beside it"])
    stored = [{name: value[row] for name, value in without_padding(family, encoded).items()} for row in (0, 1)]
    cached = [parse_tensors(memoryview(bytearray(serialize(each)))) for each in stored]
    size = family.size_conditioning(Geometry(SHAPE, SHAPE, (0, 0), SHAPE))
    clean = family.vae(CPU).encode(torch.zeros(2, 3, *SHAPE[1:]))
    noised = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))

    def predict(text: dict[str, torch.Tensor]) -> torch.Tensor:
        conditioning = text | stack_conditioning([size, size])
        with torch.no_grad():
            return family.predict(denoiser, noised, torch.full((2,), 0.5), conditioning)

    assert torch.equal(predict(stack_conditioning(cached)), predict(encoded))
    if family.padding_mask:
        embeds = encoded["prompt_embeds"][:1]
        assert len(serialize(stored[0])) < embeds.numel() * embeds.element_size(), "padding is stored"
