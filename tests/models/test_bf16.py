"""Training in bf16: latents are noised at the level that the denoiser reads from the time that it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.test_inputs import SIZE, TRAINABLE, opened
from torch import Tensor, nn

from simpletuner.data.geometry import Geometry
from simpletuner.data.prefetch import stack_conditioning
from simpletuner.models.family import Conditioning, Family
from simpletuner.models.objectives import (
    FlowMatching,
    exactly,
    flow_matching,
    rounded,
    rounded_times_1000,
    sample_losses,
)
from simpletuner.models.registry import traits_of
from simpletuner.settings.sections import Model, Settings, Training

FLOWS = [name for name in TRAINABLE if traits_of(Model(model_family=name)).objective is flow_matching]
CPU, COUNT = torch.device("cpu"), 4


def gradients(
    family: Family, model: nn.Module, noisy: Tensor, told: Tensor, target: Tensor, conditioning: Conditioning
) -> Tensor:
    """Return the gradients of all weights, computed in the dtype of the noisy latents."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=noisy.dtype == torch.bfloat16):
        answer = family.predict(model, noisy, told, conditioning)
    sample_losses(answer, target, torch.ones(COUNT)).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of norms in float32 under autocast
@pytest.mark.parametrize("name", FLOWS)
def test_gradients_in_bf16_are_nearest_to_float32_at_the_level_that_the_family_names(name, pipelines):
    family = opened(name, pipelines(name))
    model = type(family.denoiser()).from_pretrained(family.folder / family.denoiser_name).train()
    encoded = family.text_encoder(CPU, torch.float32).encode(["a red circle", "a blue star", "two rings", "a"])
    picture = family.picture_conditioning(Geometry(SIZE, SIZE, (0, 0), SIZE))
    rows = [{key: value[n] for key, value in encoded.items()} | picture for n in range(COUNT)]
    conditioning = stack_conditioning(rows)
    channels = family.vae(CPU).encode(torch.zeros(1, 3, 64, 64)).shape[1:]
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(COUNT, *channels, generator=generator) for _ in range(2))
    sigmas, objective = torch.rand(COUNT, generator=generator), family.objective()
    assert isinstance(objective, FlowMatching) and objective.seen is family.traits.level_in_bf16
    errors: dict[Callable[[Tensor], Tensor], float] = {}
    for seen in (exactly, rounded, rounded_times_1000):
        level = seen(sigmas)
        problem = FlowMatching().at(latents, noise, level)
        exact = gradients(family, model, problem.noisy, level, problem.target, conditioning)
        found = gradients(family, model, problem.noisy.bfloat16(), sigmas, problem.target, conditioning)
        errors[seen] = ((found - exact).norm() / exact.norm()).item()
    best = min(errors.values())
    assert errors[objective.seen] < 1.2 * best and best < 0.03, errors
    exact = family.__class__(family.traits, family.folder, Settings(training=Training(mixed_precision="no")))
    assert exact.objective().seen is exactly  # pyright: ignore[reportAttributeAccessIssue]
