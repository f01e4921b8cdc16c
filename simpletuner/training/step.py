"""One optimizer step, the same for every family and every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simpletuner.data.prefetch import Batch
from simpletuner.models.family import ModelFamily
from simpletuner.models.objectives import Objective, sample_losses
from simpletuner.parallel.engine import Engine


@dataclass(frozen=True)
class Outcome:
    """What a step leaves on the device: this rank's mean loss, and the global gradient norm before clipping."""

    loss: Tensor
    grad_norm: Tensor


def take_step(
    engine: Engine,
    family: ModelFamily,
    objective: Objective,
    passes: Sequence[Batch],
    dtype: torch.dtype,
    learning_rate: float,
    max_grad_norm: float,
) -> Outcome:
    """Accumulate the gradients of all passes and update the weights. Nothing here waits for the device."""
    losses = []
    for number, batch in enumerate(passes, start=1):
        noised = objective.add_noise(batch.latents, batch.noise, batch.u)
        with engine.micro_batch(number == len(passes)):
            prediction = family.predict(engine.model, noised.noised.to(dtype), noised.timesteps, batch.conditioning)
            loss = sample_losses(prediction, noised.target, noised.weights).mean()
            engine.backward(loss / len(passes))
        losses.append(loss.detach())
    grad_norm = engine.step(learning_rate, max_grad_norm)
    return Outcome(torch.stack(losses).mean(), grad_norm)
