"""Training objectives: one pure function per equation, and the two objectives that are made of them.

Shapes: latents, noise and targets are BCHW; timesteps, sigmas, weights and losses are B. `u` is uniform in
[0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.models.catalog.registry import AUTO
from simpletuner.models.family.schedulers import ShiftOfShape, published_preset, training_shift, why_no_flow
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

    from simpletuner.models.family.base import ModelFamily

PREDICTIONS = ("epsilon", "v_prediction")
"""Prediction types of diffusion that can be trained."""


@dataclass(frozen=True)
class NoisedLatents:
    """Input of the denoiser and target of its prediction; `weights` (B) scale each sample's loss."""

    x_t: Tensor
    """Latents with noise."""
    timesteps: Tensor
    target: Tensor
    weights: Tensor


class Objective(Protocol):
    """Training objective: adds noise to latents, returns the target. Must match the pipeline's scheduler."""

    def add_noise(self, latents: Tensor, noise: Tensor, u: Tensor) -> NoisedLatents:
        """Noise latents at timesteps from uniform numbers `u` (B); returns the regression target, too."""
        ...

    def at(self, latents: Tensor, noise: Tensor, timesteps: Tensor, /) -> NoisedLatents:
        """Noise latents at given timesteps (B)."""
        ...


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, ...) so that it broadcasts along the batch of `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))


def diffused(latents: Tensor, noise: Tensor, alphas_cumprod: Tensor) -> Tensor:
    # Ho et al. 2020, arXiv:2006.11239, eq. 4.
    a = per_sample(alphas_cumprod, latents)
    return a.sqrt() * latents + (1 - a).sqrt() * noise


def velocity(latents: Tensor, noise: Tensor, alphas_cumprod: Tensor) -> Tensor:
    # Salimans and Ho 2022, arXiv:2202.00512, section 4.
    a = per_sample(alphas_cumprod, latents)
    return a.sqrt() * noise - (1 - a).sqrt() * latents


def signal_to_noise(alphas_cumprod: Tensor) -> Tensor:
    # Kingma et al. 2021, arXiv:2107.00630, eq. 2.
    return alphas_cumprod / (1 - alphas_cumprod)


def min_snr_weights(snr: Tensor, gamma: float, prediction: Literal["epsilon", "v_prediction"]) -> Tensor:
    # min(SNR, gamma) / SNR for epsilon, / (SNR + 1) for v (Hang et al. 2023, arXiv:2303.09556, 3.4).
    if prediction == "v_prediction":
        return snr.clamp(max=gamma) / (snr + 1)
    # min(snr, gamma) / snr would be 0 / 0 at zero terminal SNR, where the weight tends to 1.
    return (gamma / snr).clamp(max=1.0)


def logit_normal(u: Tensor, scale: float = 1.0) -> Tensor:
    # z is normal by the inverse CDF of u (Esser et al. 2024, arXiv:2403.03206, eq. 19).
    # Clamped, since the quantile of 0 is infinite; u is in [0, 1).
    z = torch.special.ndtri(u.double().clamp(1e-6, 1 - 1e-6))
    return torch.sigmoid(scale * z).to(u.dtype)


def shifted(sigmas: Tensor, shift: float) -> Tensor:
    # Esser et al. 2024, arXiv:2403.03206, eq. 23.
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def interpolated(latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    # Liu et al. 2022, arXiv:2209.03003, eq. 1.
    s = per_sample(sigmas, latents)
    return (1 - s) * latents + s * noise


# Smallest sum of a mask, in cells: the loss of an image with a black mask is 0, not 0 / 0.
LEAST_MASK = 1e-3


def sample_losses(prediction: Tensor, target: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weighted mean squared error of each sample (B), in float32.

    With a mask, of one channel, the mean over cells by their share in it: what counts weighs the same however
    small.
    """
    errors = (prediction.float() - target.float()).square()
    if mask is None:
        return weights * errors.flatten(1).mean(1)
    masked = (errors.mean(1, keepdim=True) * mask).flatten(1).sum(1)
    return weights * masked / mask.flatten(1).sum(1).clamp(min=LEAST_MASK)


@dataclass(frozen=True)
class Diffusion:
    """Discrete-time diffusion towards epsilon or v; `alphas_cumprod` has one value per timestep."""

    alphas_cumprod: Tensor
    prediction: Literal["epsilon", "v_prediction"]
    snr_gamma: float | None = None
    moved: dict[torch.device, Tensor] = field(default_factory=dict)
    """`alphas_cumprod` by device: copied at each step, it would make each step wait for the one before."""

    def add_noise(self, latents: Tensor, noise: Tensor, u: Tensor) -> NoisedLatents:
        """Noise latents at timesteps that are uniform over 0..T-1."""
        count = len(self.alphas_cumprod)
        # Clamped: `u` is drawn in float64, and may be 1 once it is rounded to float32.
        return self.at(latents, noise, (u * count).long().clamp(max=count - 1))

    def at(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> NoisedLatents:
        if latents.device not in self.moved:
            self.moved[latents.device] = self.alphas_cumprod.to(latents.device)
        a = self.moved[latents.device][timesteps]
        target = noise if self.prediction == "epsilon" else velocity(latents, noise, a)
        weights = torch.ones_like(a)
        if self.snr_gamma is not None:
            weights = min_snr_weights(signal_to_noise(a), self.snr_gamma, self.prediction)
        return NoisedLatents(diffused(latents, noise, a), timesteps, target, weights)


def keep_float32(sigmas: Tensor) -> Tensor:
    """Sigmas as a denoiser computes with them that embeds its timestep in float32."""
    return sigmas


def round_to_bf16(sigmas: Tensor) -> Tensor:
    """Sigmas as a denoiser computes with them that casts its timestep to bf16."""
    return sigmas.bfloat16().float()


def round_to_bf16_times_1000(sigmas: Tensor) -> Tensor:
    """Sigmas of a denoiser that casts its timestep to bf16 and multiplies it by 1000 in bf16."""
    return (sigmas.bfloat16() * 1000).float() / 1000


def round_time_to_bf16(sigmas: Tensor) -> Tensor:
    """Sigmas of a denoiser whose time is 1 - sigma in bf16: steps of 0.004 near the image."""
    return 1 - round_to_bf16(1 - sigmas)


EVERY_SIGMA = (0.0, 1.0)


@dataclass(frozen=True)
class FlowMatching:
    """Rectified flow towards eps - x_0; timesteps are sigmas in 0..1.

    `shift` may be a function of the latents' shape. `round_sigmas` maps sigmas to those that the denoiser
    computes with in its dtype. Where the pipeline calls the denoiser in a part of the levels alone,
    `sigma_range`, they have the distribution of all levels given that they are in it: `u` is mapped to the
    numbers that lead there.
    """

    shift: float | ShiftOfShape = 3.0
    sigmoid_scale: float = 1.0
    uniform: bool = False
    round_sigmas: Callable[[Tensor], Tensor] = keep_float32
    sigma_range: tuple[float, float] = EVERY_SIGMA

    def add_noise(self, latents: Tensor, noise: Tensor, u: Tensor) -> NoisedLatents:
        """Noise latents at logit-normal (or uniform) sigmas, shifted towards noise."""
        shift = self.shift(Shape.of_axes(latents.shape[2:])) if callable(self.shift) else self.shift
        if self.sigma_range == EVERY_SIGMA:
            return self.at(latents, noise, self.sigmas(u, shift))
        low, high = (self.share_below(sigma, shift) for sigma in self.sigma_range)
        # Clamped: float32 may round the first and the last of them out of the range.
        return self.at(latents, noise, self.sigmas(low + (high - low) * u, shift).clamp(*self.sigma_range))

    def sigmas(self, u: Tensor, shift: float) -> Tensor:
        return shifted(u if self.uniform else logit_normal(u, self.sigmoid_scale), shift)

    def share_below(self, sigma: float, shift: float) -> float:
        """Return the share of all noise levels that are below `sigma`: the `u` that leads to it."""
        level = sigma / (shift - (shift - 1) * sigma)
        if self.uniform or level in (0, 1):
            return level
        return NormalDist().cdf(math.log(level / (1 - level)) / self.sigmoid_scale)

    def at(self, latents: Tensor, noise: Tensor, sigmas: Tensor) -> NoisedLatents:
        # Noised at the sigma that the denoiser computes with: at the exact one, gradients in bf16 are off by
        # 3 to 16 % instead of 0.4 to 0.6 % (tiny flux, flux2, chroma and qwen_image;
        # tests/models/test_bf16.py).
        noised = interpolated(latents, noise, self.round_sigmas(sigmas))
        return NoisedLatents(noised, sigmas, noise - latents, torch.ones_like(sigmas))


def diffusion(family: ModelFamily, /) -> Diffusion:
    """Diffusion with the betas and prediction type of the family's scheduler.

    Raises EnvironmentNotReady for a scheduler that samples from anything but epsilon or v at discrete
    timesteps.
    """
    from diffusers import DDPMScheduler

    own = family.scheduler()
    prediction = own.config.get("prediction_type", "epsilon")
    if not hasattr(own, "alphas_cumprod") or own.config.get("use_flow_sigmas") or prediction not in PREDICTIONS:
        raise wrong_target(family, own, f"only {' or '.join(PREDICTIONS)} over a schedule of betas")
    # At zero terminal SNR Euler's scheduler overwrites the last of its alphas_cumprod, 0, with 2**-24 to keep
    # sigma finite; DDPM's keeps the 0 that is to be trained.
    scheduler: Any = DDPMScheduler.from_config(own.config)
    return Diffusion(scheduler.alphas_cumprod, prediction, family.settings.objective.snr_gamma)


def flow_matching(family: ModelFamily, /) -> FlowMatching:
    """Flow matching with the distribution of sigmas that the settings choose.

    Raises EnvironmentNotReady for a scheduler that samples by diffusion, and SettingsError for a prediction
    type: it would be exported with the scheduler, which would then sample with it.
    """
    model = family.settings.model
    if model.prediction_type:
        raise SettingsError(
            f"prediction_type={model.prediction_type} has no meaning for the flow of model_family={model.model_family}",
            "leave prediction_type out",
        )
    own = family.scheduler()
    if samples_by_diffusion(own) or (not has_flow_sigmas(own) and "sigma_data" in own.config):
        raise wrong_target(family, own, "flow matching")
    # auto has a proof of its own, and a class of the user's may call its denoiser with other times.
    preset = published_preset(family)
    if preset and preset.has_class and model.model_family != AUTO and (why := why_no_flow(own)):
        raise EnvironmentNotReady(
            f"{family.folder} samples with {describe(own)}, which {why}: model_family={model.model_family} would train "
            "what it does not sample",
            "correct its scheduler_config.json, or set model_family=auto, which proves what a pipeline samples",
        )
    objective = family.settings.objective
    in_bf16 = family.settings.training.mixed_precision == "bf16"
    return FlowMatching(
        training_shift(family),
        objective.flow_sigmoid_scale,
        objective.flow_use_uniform_schedule,
        family.round_sigmas_in_bf16 if in_bf16 else keep_float32,
        family.sigma_range,
    )


def samples_by_diffusion(scheduler: SchedulerMixin) -> bool:
    """True for a scheduler over a schedule of betas, False for a flow."""
    return hasattr(scheduler, "alphas_cumprod") and not has_flow_sigmas(scheduler)


def has_flow_sigmas(scheduler: SchedulerMixin) -> bool:
    """True if a diffusion scheduler is configured to sample a flow."""
    config = scheduler.config
    return bool(config.get("use_flow_sigmas")) or config.get("prediction_type") == "flow_prediction"


def wrong_target(family: ModelFamily, scheduler: SchedulerMixin, trained: str) -> EnvironmentNotReady:
    name = family.settings.model.model_family
    return EnvironmentNotReady(
        f"{family.folder} samples with {describe(scheduler)}, but model_family={name} trains {trained}: "
        "it would learn the wrong target",
        f"choose a pipeline whose scheduler fits model_family={name}",
    )


def describe(scheduler: SchedulerMixin) -> str:
    prediction = scheduler.config.get("prediction_type")
    return type(scheduler).__name__ + (f" (prediction_type {prediction})" if prediction else "")
