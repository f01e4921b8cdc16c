"""Several latents of one sample, denoised together: the video and the sound of a clip.

A mapping by stream has the sample's own latents first, under LATENTS, and of most models nothing else.
Streams share the noise level: pipelines sample all of them over the same levels.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from simpletuner.data.prefetch import LATENTS, SOUND, Batch
from simpletuner.models.family.objectives import NoisedLatents, Objective, sample_losses

if TYPE_CHECKING:
    import torch

    from simpletuner.models.family.base import ModelFamily

STREAM_NAMES = {LATENTS: "video"}
"""Names of streams in metrics, of those that have another one there."""


def take_streams(inputs: MutableMapping[str, Tensor]) -> dict[str, Tensor]:
    """Take what is noised out of all inputs of a denoiser, by name."""
    return {name: inputs.pop(name) for name in (LATENTS, SOUND) if name in inputs}


def noise_streams(objective: Objective, batch: Batch) -> dict[str, NoisedLatents]:
    """Noise all streams of a batch at the levels that its `u` gives the first."""
    first = objective.add_noise(batch.latents, batch.noise, batch.u)
    others = {name: objective.at(clean, noise, first.timesteps) for name, (clean, noise) in batch.streams.items()}
    return {LATENTS: first, **others}


def predict_streams(
    family: ModelFamily, model: nn.Module, noised: Mapping[str, NoisedLatents], dtype: torch.dtype, batch: Batch
) -> Mapping[str, Tensor]:
    """Return the prediction of each stream, computed in `dtype`."""
    inputs = {name: each.x_t.to(dtype) for name, each in noised.items()}
    return family.predict_streams(model, inputs, noised[LATENTS].timesteps, batch.conditioning)


def stream_losses(
    prediction: Mapping[str, Tensor], noised: Mapping[str, NoisedLatents], mask: Tensor | None
) -> dict[str, Tensor]:
    """Loss of each sample (B) by stream; `mask` is that of the first one."""
    return {
        name: sample_losses(prediction[name], each.target, each.weights, mask if name == LATENTS else None)
        for name, each in noised.items()
    }


def weighted_sum(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Loss of each sample (B): that of its first stream, and of others by their weights."""
    total, *others = (each * weights[name] if name in weights else each for name, each in losses.items())
    return sum(others, total)
