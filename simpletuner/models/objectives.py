"""What a denoiser is trained towards: one pure function per equation, and two objectives made of them.

Shapes: latents, noise and everything like them are BCHW; times, weights and losses are B. `u` is uniform in [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady, SettingsError

if TYPE_CHECKING:
    from simpletuner.models.family import Family

PREDICTIONS = ("epsilon", "v_prediction")
"""What a model trained by diffusion may predict."""


@dataclass(frozen=True)
class NoisedLatents:
    """What the denoiser is shown and what it should answer; `weights` scale each sample's loss."""

    noisy: Tensor
    timesteps: Tensor
    target: Tensor
    weights: Tensor


class Objective(Protocol):
    """Turn clean latents into a training problem; the scheduler of the pipeline must be able to undo it."""

    def corrupt(self, latents: Tensor, noise: Tensor, u: Tensor) -> NoisedLatents:
        """Return the problem for these latents, this noise and these uniform draws."""
        ...


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Return values of shape B so that they multiply along the batch of `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))


def diffused(latents: Tensor, noise: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Return x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) eps (Ho et al. 2020, arXiv:2006.11239, eq. 4)."""
    a = per_sample(alphas_cumprod, latents)
    return a.sqrt() * latents + (1 - a).sqrt() * noise


def velocity(latents: Tensor, noise: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Return v_t = sqrt(a_t) eps - sqrt(1 - a_t) x_0 (Salimans and Ho 2022, arXiv:2202.00512, section 4)."""
    a = per_sample(alphas_cumprod, latents)
    return a.sqrt() * noise - (1 - a).sqrt() * latents


def signal_to_noise(alphas_cumprod: Tensor) -> Tensor:
    """Return SNR(t) = a_t / (1 - a_t) (Kingma et al. 2021, arXiv:2107.00630, eq. 2)."""
    return alphas_cumprod / (1 - alphas_cumprod)


def min_snr_weights(snr: Tensor, gamma: float, prediction: Literal["epsilon", "v_prediction"]) -> Tensor:
    """Return min(SNR, gamma) / SNR for epsilon, / (SNR + 1) for v (Hang et al. 2023, arXiv:2303.09556, section 3.4).

    At zero terminal SNR the epsilon weight tends to 1, which is what this returns.
    """
    if prediction == "v_prediction":
        return snr.clamp(max=gamma) / (snr + 1)
    return (gamma / snr).clamp(max=1.0)


def logit_normal(u: Tensor, scale: float = 1.0) -> Tensor:
    """Return sigmoid(scale * z), z normal by the inverse CDF of u (Esser et al. 2024, arXiv:2403.03206, eq. 19)."""
    z = torch.special.ndtri(u.double().clamp(1e-6, 1 - 1e-6))
    return torch.sigmoid(scale * z).to(u.dtype)


def shifted(sigmas: Tensor, shift: float) -> Tensor:
    """Return shift * s / (1 + (shift - 1) * s) (Esser et al. 2024, arXiv:2403.03206, eq. 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def interpolated(latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """Return x_s = (1 - s) x_0 + s eps (Liu et al. 2022, arXiv:2209.03003, eq. 1)."""
    s = per_sample(sigmas, latents)
    return (1 - s) * latents + s * noise


def sample_losses(prediction: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return each sample's weighted mean squared error, in float32."""
    return weights * (prediction.float() - target.float()).square().flatten(1).mean(1)


@dataclass(frozen=True)
class Diffusion:
    """Discrete-time diffusion towards epsilon or v; `alphas_cumprod` has one value per timestep."""

    alphas_cumprod: Tensor
    prediction: Literal["epsilon", "v_prediction"]
    snr_gamma: float | None = None

    def corrupt(self, latents: Tensor, noise: Tensor, u: Tensor) -> NoisedLatents:
        """Return the problem at timesteps drawn uniformly from 0..T-1."""
        count = len(self.alphas_cumprod)
        return self.at(latents, noise, (u * count).long().clamp(max=count - 1))

    def at(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> NoisedLatents:
        """Return the problem at these timesteps."""
        a = self.alphas_cumprod.to(latents.device)[timesteps]
        target = noise if self.prediction == "epsilon" else velocity(latents, noise, a)
        weights = torch.ones_like(a)
        if self.snr_gamma is not None:
            weights = min_snr_weights(signal_to_noise(a), self.snr_gamma, self.prediction)
        return NoisedLatents(diffused(latents, noise, a), timesteps, target, weights)


def exactly(sigmas: Tensor) -> Tensor:
    """Return noise levels as they are: the denoiser reads its time in float32."""
    return sigmas


def rounded(sigmas: Tensor) -> Tensor:
    """Return noise levels as a denoiser reads them that casts its time to bf16."""
    return sigmas.bfloat16().float()


def rounded_times_1000(sigmas: Tensor) -> Tensor:
    """Return noise levels as a denoiser reads them that casts its time to bf16 and multiplies it by 1000 there."""
    return (sigmas.bfloat16() * 1000).float() / 1000


@dataclass(frozen=True)
class FlowMatching:
    """Rectified flow towards eps - x_0; timesteps are noise levels in 0..1.

    `seen` turns levels into those that the denoiser reads from them in its dtype. Latents are noised with these: at any
    other level, gradients in bf16 are off by 3 to 16 % instead of 0.4 to 0.6 % (tiny flux, flux2, chroma, qwen_image).
    """

    shift: float = 3.0
    sigmoid_scale: float = 1.0
    uniform: bool = False
    seen: Callable[[Tensor], Tensor] = exactly

    def corrupt(self, latents: Tensor, noise: Tensor, u: Tensor) -> NoisedLatents:
        """Return the problem at logit-normal (or uniform) noise levels, shifted towards noise."""
        return self.at(latents, noise, shifted(u if self.uniform else logit_normal(u, self.sigmoid_scale), self.shift))

    def at(self, latents: Tensor, noise: Tensor, sigmas: Tensor) -> NoisedLatents:
        """Return the problem at these noise levels."""
        noisy = interpolated(latents, noise, self.seen(sigmas))
        return NoisedLatents(noisy, sigmas, noise - latents, torch.ones_like(sigmas))


def diffusion(family: Family) -> Diffusion:
    """Return diffusion with the betas and prediction type of a family's scheduler.

    Raises EnvironmentFault for a scheduler that draws from anything but epsilon or v at discrete times.
    """
    from diffusers import DDPMScheduler

    own = family.scheduler()
    prediction = own.config.get("prediction_type", "epsilon")
    if not hasattr(own, "alphas_cumprod") or own.config.get("use_flow_sigmas") or prediction not in PREDICTIONS:
        raise wrong_target(family, own, f"only {' or '.join(PREDICTIONS)} over a schedule of betas")
    scheduler: Any = DDPMScheduler.from_config(own.config)
    return Diffusion(scheduler.alphas_cumprod, prediction, family.settings.objective.snr_gamma)


def flow_matching(family: Family) -> FlowMatching:
    """Return flow matching with the settings' noise levels.

    Raises EnvironmentFault for a scheduler that draws by diffusion, SettingsError for a prediction type, with which the
    exported scheduler would draw.
    """
    model = family.settings.model
    if model.prediction_type:
        raise SettingsError(
            f"prediction_type={model.prediction_type} has no meaning for the flow of model_family={model.model_family}",
            "leave prediction_type out",
        )
    own = family.scheduler()
    flows = own.config.get("use_flow_sigmas") or own.config.get("prediction_type") == "flow_prediction"
    if not flows and (hasattr(own, "alphas_cumprod") or "sigma_data" in own.config):
        raise wrong_target(family, own, "flow matching")
    objective = family.settings.objective
    in_bf16 = family.settings.training.mixed_precision == "bf16"
    return FlowMatching(
        objective.flow_schedule_shift,
        objective.flow_sigmoid_scale,
        objective.flow_use_uniform_schedule,
        family.traits.level_in_bf16 if in_bf16 else exactly,
    )


def wrong_target(family: Family, scheduler: Any, trained: str) -> EnvironmentNotReady:
    """Return the error of a pipeline that is not drawn by what its family is trained for."""
    name = family.settings.model.model_family
    return EnvironmentNotReady(
        f"{family.folder} draws with {described(scheduler)}, but model_family={name} trains {trained}: "
        "it would learn the wrong target",
        f"choose a pipeline whose scheduler fits model_family={name}",
    )


def described(scheduler: Any) -> str:
    """Return a scheduler's class and what its model predicts."""
    prediction = scheduler.config.get("prediction_type")
    return type(scheduler).__name__ + (f" (prediction_type {prediction})" if prediction else "")
