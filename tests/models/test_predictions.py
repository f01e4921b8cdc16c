"""What every family predicts: what diffusers' own pipeline goes on with, and for each caption of a batch its own.

Nothing here names a family: a new preset is tested by being there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models.test_inputs import (
    BY_CLASS,
    CPU,
    PROMPT,
    SHAPE,
    WITH_OTHERS,
    diffusers_denoiser,
    diffusers_pipeline,
    opened,
    opened_for_short_captions,
    sampling,
)
from torch import Tensor

from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import stack_conditioning
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import FlowMatching
from simpletuner.models.family.text_encoding import Conditioning

CAPTIONS = ("a red circle", "", "a large red circle and two small blue squares on a bright background, in pink")


def conditioning_of(family: ModelFamily, texts: Sequence[Conditioning]) -> Conditioning:
    """Return the conditioning of some texts and an image for each, batched as for training."""
    size = family.size_conditioning(Geometry(SHAPE, SHAPE, (0, 0), SHAPE))
    return stack_conditioning([{**text, **size} for text in texts])


def rows(encoded: Conditioning) -> list[Conditioning]:
    """Return what was encoded together as the cache keeps it: caption by caption."""
    return [{name: value[n] for name, value in encoded.items()} for n in range(len(encoded["prompt_embeds"]))]


def steps_of(family: ModelFamily, pipeline: Any, guidance: float = 1.0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, for each sampling step, time, latents and prediction as the family's objective has them."""
    handed = []

    class Listening(type(pipeline.scheduler)):
        def step(self, model_output, timestep, sample, **named):
            scaled = hasattr(self, "scale_model_input")
            shown = self.scale_model_input(sample, timestep) if scaled else sample
            # Given a time for each token, the scheduler counts steps upwards, and pipelines negate the prediction.
            prediction = -model_output if named.get("per_token_timesteps") is not None else model_output
            handed.append((timestep, shown, prediction))
            return super().step(model_output, timestep, sample, **named)

    pipeline.scheduler = Listening.from_config(pipeline.scheduler.config)
    pipeline(prompt=PROMPT, **family.pipeline_kwargs({}, {}, sampling(guidance)))
    shape = SHAPE.in_cells(family.vae(CPU).cell)
    flow = isinstance(family.objective(), FlowMatching)
    count = pipeline.scheduler.config.num_train_timesteps if flow else 1
    return [(time[None] / count, *(family.unpack_latents(each, shape) for each in both)) for time, *both in handed]


@pytest.mark.parametrize("key", [key for key in BY_CLASS if key not in WITH_OTHERS])
def test_a_prediction_is_what_diffusers_own_pipeline_hands_its_scheduler(key, pipelines):
    family = opened(key, pipelines(key))
    pipeline = diffusers_pipeline(family)
    time, noisy, theirs = steps_of(family, pipeline)[1]
    text = family.text_encoder(CPU, torch.float32).encode([PROMPT])
    with torch.no_grad():
        ours = family.predict(getattr(pipeline, family.denoiser_name), noisy, time, conditioning_of(family, rows(text)))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("key", BY_CLASS)
def test_captions_of_any_length_in_one_batch_give_each_the_prediction_it_gets_alone(key, pipelines):
    family = opened_for_short_captions(key, pipelines(key), tokens=48)  # of CAPTIONS none has more
    denoiser, encoder = diffusers_denoiser(family), family.text_encoder(CPU, torch.float32)
    pixels = torch.rand(1, 3, *SHAPE[1:], generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = family.vae(CPU).encode(pixels)
    time = torch.tensor([0.5 if isinstance(family.objective(), FlowMatching) else 500])

    def predictions(texts: Sequence[Conditioning]) -> Tensor:
        with torch.no_grad():
            noised, times = latents.expand(len(texts), -1, -1, -1), time.expand(len(texts))
            return family.predict(denoiser, noised, times, conditioning_of(family, texts))

    alone = [row for caption in CAPTIONS for row in rows(encoder.encode([caption]))]
    expected = torch.cat([predictions([text]) for text in alone])
    together = rows(encoder.encode(CAPTIONS))
    assert (expected - expected.roll(1, 0)).flatten(1).abs().amax(1).min() > 1e-3, "equal predictions prove nothing"
    for texts in (alone, together):
        torch.testing.assert_close(predictions(texts), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(predictions(together[:1]), expected[:1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("key", BY_CLASS)
def test_a_weight_gets_a_gradient_unless_the_family_calls_it_unused(key, pipelines):
    family = opened_for_short_captions(key, pipelines(key), tokens=48)  # of CAPTIONS none has more
    denoiser, encoder = diffusers_denoiser(family), family.text_encoder(CPU, torch.float32)
    clean = family.vae(CPU).encode(torch.zeros(len(CAPTIONS), 3, *SHAPE[1:]))
    noised = family.objective().add_noise(clean, torch.randn_like(clean), torch.full((len(CAPTIONS),), 0.5))
    texts = rows(encoder.encode(CAPTIONS))
    family.predict(denoiser, noised.x_t, noised.timesteps, conditioning_of(family, texts)).square().mean().backward()
    trained = {name for name, parameter in family.denoiser().named_parameters() if parameter.requires_grad}
    reached = {name for name, each in denoiser.named_parameters() if each.grad is not None and each.grad.any()}
    may_be_zero = {name for name in trained if name.startswith(family.zero_gradients())}
    assert reached | may_be_zero == trained


@pytest.mark.parametrize("key", BY_CLASS)
def test_a_denoiser_without_any_memory_has_the_tensors_of_one_whose_buffers_have_values(key, pipelines):
    family = opened(key, pipelines(key))

    def described(model: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()}

    assert described(family.meta_denoiser) == described(family.denoiser())
    assert all(tensor.is_meta for tensor in [*family.meta_denoiser.parameters(), *family.meta_denoiser.buffers()])
