"""model_family=auto makes of every built-in family's pipeline what its class makes of it.

Nothing here names a family: a new preset is tested by being there, and a sign error in a class would be found.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flags import tokens_of
from models.test_inputs import (
    BY_CLASS,
    CPU,
    OF_CLIPS,
    SHAPE,
    WITH_OTHERS,
    diffusers_denoiser,
    opened,
    recorded_call,
    same,
)
from torch import Tensor, nn

from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import stack_conditioning
from simpletuner.models.automatic.family import SMALLEST, AutomaticFamily
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.objectives import sample_losses
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.vae import Vae
from simpletuner.settings.declared.sections import Data, Model, ObjectiveSettings, Settings, Training
from simpletuner.settings.values.shape import Shape

CAPTIONS = ["a red circle", "a large red circle and two small blue squares on a bright background, in pink", ""]

CLIP = SHAPE._replace(frames=9)


TOKENS = 48
"""Longest caption where a call takes a length: those of 512 tokens, its default, take up to three times as long."""

SAME = {"objective": ObjectiveSettings(flow_schedule_shift=2.0), "training": Training(mixed_precision="no")}
"""Settings of both: a class has the shift of its published checkpoints, and rounds noise levels in bf16."""


def automatic(folder: Path, *shapes: Shape, proven: bool = True, tokens: int | None = TOKENS) -> AutomaticFamily:
    """Open a folder by model_family=auto, proven at these shapes, or else at 64 x 64 px."""
    model = Model(model_family="auto", pretrained_model_name_or_path=str(folder))
    settings = Settings(model=model, data=Data(tokenizer_max_length=tokens), **SAME)
    family = family_class(model).open(folder, settings)
    assert isinstance(family, AutomaticFamily)
    if proven:
        family.prove([*shapes] or [SMALLEST], CPU)
    return family


def conditioning_of(family: ModelFamily) -> list[Conditioning]:
    """Return the conditioning of each caption, as the cache keeps it; the last one is no caption."""
    size = family.size_conditioning(Geometry(SHAPE, SHAPE, (0, 0), SHAPE))
    encoded = family.text_encoder(CPU, torch.float32).encode(CAPTIONS)
    empty = family.unconditional({name: value[-1:] for name, value in encoded.items()})
    rows = [{name: value[number] for name, value in encoded.items()} for number in range(len(CAPTIONS) - 1)]
    return [{**row, **size} for row in (*rows, {name: value[0] for name, value in empty.items()})]


def trained(
    family: ModelFamily, vae: Vae, denoiser: nn.Module, texts: list[Conditioning], shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the prediction, flat, the loss of each sample, and all gradients."""
    pixels = torch.rand(1, 3, *shape.axes, generator=torch.Generator().manual_seed(0)) * 2 - 1
    clean = vae.encode(pixels)
    clean = clean.expand(len(texts), *clean.shape[1:])
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    noised = family.objective().add_noise(clean, noise, torch.linspace(0.2, 0.8, len(texts)))
    prediction = family.predict(denoiser, noised.x_t, noised.timesteps, stack_conditioning(texts))
    losses = sample_losses(prediction, noised.target, noised.weights)
    denoiser.zero_grad()
    losses.mean().backward()
    grads = [each.grad.flatten() for each in denoiser.parameters() if each.grad is not None]
    return prediction.detach().flatten(1), losses.detach(), torch.cat(grads)


def inputs_of(family: ModelFamily, denoiser: nn.Module, text: Conditioning, shape: Shape) -> dict[str, Any]:
    noised = torch.randn(1, *family.input_shapes(shape)["latents"], generator=torch.Generator().manual_seed(2))
    times = torch.tensor([0.5 if "Flow" in type(family.objective()).__name__ else 500])
    return recorded_call(denoiser, lambda: family.predict(denoiser, noised, times, stack_conditioning([text])))


BOTH = [*((key, SHAPE) for key in BY_CLASS), *((key, CLIP) for key in OF_CLIPS)]


@pytest.mark.parametrize(
    ("key", "shape"), [(key, shape) for key, shape in BOTH if key not in (*WITH_OTHERS, "ideogram4")]
)
def test_auto_trains_and_samples_as_the_class_does(key, shape, pipelines):
    expect_parity(key, pipelines, shape=shape)


def expect_parity(key: str, pipelines: Callable[[str], Path], folder: Path | None = None, shape: Shape = SHAPE) -> None:
    """Compare inputs of the denoiser, predictions, losses, gradients, unused weights and samples.

    `folder` is what auto opens, if not that of the class.
    """
    tokens = TOKENS if tokens_of(key) else None
    hand = opened(key, pipelines(key), tokens=tokens)
    auto = automatic(folder or pipelines(key), SMALLEST._replace(frames=shape.frames), tokens=tokens)
    hand.settings = hand.settings.model_copy(update=SAME)
    denoiser = diffusers_denoiser(hand)
    texts, vaes = [conditioning_of(family) for family in (hand, auto)], [family.vae(CPU) for family in (hand, auto)]

    ours, theirs = (inputs_of(each, denoiser, text[0], shape) for each, text in ((auto, texts[1]), (hand, texts[0])))
    # Blocks of Qwen-Image hand in a mask of ones, which its plain pipeline leaves out.
    extra = ours.keys() - theirs.keys()
    assert theirs.keys() <= ours.keys() and all((ours[name] == 1).all() for name in extra)
    for name, value in theirs.items():
        same(ours[name], value, name)

    (mine, losses, grads), expected = (
        trained(each, vae, denoiser, text, shape)
        for each, vae, text in ((auto, vaes[1], texts[1]), (hand, vaes[0], texts[0]))
    )
    torch.testing.assert_close(mine, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(losses, expected[1], atol=1e-5, rtol=1e-5)
    assert (grads - expected[2]).norm() < 1e-5 * expected[2].norm()
    assert {*auto.unused_parameters()} == {name for name, each in denoiser.named_parameters() if each.grad is None}
    zero = [name for name, each in denoiser.named_parameters() if each.grad is not None and not each.grad.any()]
    assert all(name.startswith(auto.zero_gradients()) for name in zero)

    sampling = SamplingParams(shape, 2, 3.0, seed=7)
    samples = [
        family.sample(denoiser, vae, sampling, *(stack_conditioning([text]) for text in (own[0], own[2])))
        for family, vae, own in ((auto, vaes[1], texts[1]), (hand, vaes[0], texts[0]))
    ]
    torch.testing.assert_close(samples[0].flatten(), samples[1].flatten(), atol=1e-4, rtol=1e-3)


def test_a_last_layer_that_begins_at_zero_hides_no_gradient(pipelines):
    """ERNIE-Image: of a prediction of zeros the square has no gradient, of a direction the last layer has one."""
    ernie = automatic(pipelines("ernie"))
    last = [name for name, each in diffusers_denoiser(ernie).named_parameters() if name.startswith("final_linear")]
    assert last and not any(name.startswith(ernie.zero_gradients()) for name in last)
