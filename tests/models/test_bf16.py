"""Training in bf16: latents are noised at the sigma that the denoiser computes with, given its timestep in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.test_inputs import BY_CLASS, SHAPE, opened_for_short_captions
from torch import Tensor, nn

from simpletuner.data.images.geometry import Geometry
from simpletuner.data.prefetch import stack_conditioning
from simpletuner.models.family.base import ModelFamily, family_class
from simpletuner.models.family.objectives import (
    FlowMatching,
    flow_matching,
    keep_float32,
    round_time_to_bf16,
    round_to_bf16,
    round_to_bf16_times_1000,
    sample_losses,
)
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.settings.declared.sections import Model, Settings, Training

FLOWS = [name for name in BY_CLASS if family_class(Model(model_family=name)).objective is flow_matching]
CPU, COUNT = torch.device("cpu"), 4


def gradients(
    family: ModelFamily, model: nn.Module, noised: Tensor, timesteps: Tensor, target: Tensor, conditioning: Conditioning
) -> Tensor:
    """Return the gradients of all weights, computed in the dtype of the noised latents."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=noised.dtype == torch.bfloat16):
        prediction = family.predict(model, noised, timesteps, conditioning)
    sample_losses(prediction, target, torch.ones(COUNT)).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of norms in float32 under autocast
@pytest.mark.parametrize("name", FLOWS)
def test_gradients_in_bf16_are_nearest_to_float32_at_the_rounding_that_the_family_names(name, pipelines):
    family = opened_for_short_captions(name, pipelines(name))
    model = type(family.denoiser()).from_pretrained(family.folder / family.denoiser_name).train()
    encoded = family.text_encoder(CPU, torch.float32).encode(["a red circle", "a blue star", "two rings", "a"])
    size = family.size_conditioning(Geometry(SHAPE, SHAPE, (0, 0), SHAPE))
    rows = [{key: value[n] for key, value in encoded.items()} | size for n in range(COUNT)]
    conditioning = stack_conditioning(rows)
    channels = family.vae(CPU).encode(torch.zeros(1, 3, 64, 64)).shape[1:]
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(COUNT, *channels, generator=generator) for _ in range(2))
    sigmas, objective = torch.rand(COUNT, generator=generator), family.objective()
    assert isinstance(objective, FlowMatching) and objective.round_sigmas is family.round_sigmas_in_bf16
    errors: dict[Callable[[Tensor], Tensor], float] = {}
    for rounding in (keep_float32, round_to_bf16, round_to_bf16_times_1000, round_time_to_bf16):
        rounded = rounding(sigmas)
        example = FlowMatching().at(latents, noise, rounded)
        exact = gradients(family, model, example.x_t, rounded, example.target, conditioning)
        found = gradients(family, model, example.x_t.bfloat16(), sigmas, example.target, conditioning)
        errors[rounding] = ((found - exact).norm() / exact.norm()).item()
    best = min(errors.values())
    assert errors[objective.round_sigmas] < 1.2 * best and best < 0.03, errors
    exact = type(family)(family.folder, Settings(training=Training(mixed_precision="no")))
    assert exact.objective().round_sigmas is keep_float32  # pyright: ignore[reportAttributeAccessIssue]
