"""Schedulers of a pipeline: objective and times, exact predictions, and a scheduler of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from simpletuner.models.automatic.pipeline_run import PipelineRun, StopCall, refused
from simpletuner.models.family.objectives import samples_by_diffusion, velocity
from simpletuner.models.family.schedulers import STEPS, noise_levels, with_steps

if TYPE_CHECKING:
    from diffusers import SchedulerMixin


@dataclass(frozen=True)
class NoiseSchedule:
    """Objective that a pipeline's scheduler samples from, and the time that its denoiser gets."""

    objective: Literal["flow", "diffusion"]
    slope: float = 1.0
    offset: float = 0.0
    """Flow matching: time = slope * noise level + offset."""

    def time(self, timesteps: Tensor) -> Tensor:
        """Convert the objective's timesteps (B) to the scheduler's."""
        if self.objective == "diffusion":
            return timesteps
        scaled = timesteps * self.slope
        return scaled + self.offset if self.offset else scaled

    def timesteps(self, *shares: float) -> Tensor:
        # Of 1000 in diffusion, of 1 in a flow.
        return torch.tensor([round(share * 1000) for share in shares] if self.objective == "diffusion" else shares)

    def example(self) -> Tensor:
        """Return the time of one sample at which inputs are studied."""
        return self.time(self.timesteps(0.3))


def study_schedule(scheduler: SchedulerMixin, pipeline: str) -> NoiseSchedule:
    """Find the objective and the time in a scheduler. Raises SettingsError for one that is neither."""
    config = scheduler.config
    if samples_by_diffusion(scheduler):
        return NoiseSchedule("diffusion")
    if "sigma_data" in config:
        raise refused(pipeline, f"{type(scheduler).__name__} is for EDM, which is not trained here")
    try:
        own = with_steps(scheduler, STEPS)
        times = own.timesteps[:STEPS].double()
        levels = noise_levels(own.sigmas)[: len(times)].double()
    except (AttributeError, TypeError, ValueError) as error:
        raise refused(pipeline, f"{type(scheduler).__name__} has no noise levels to train at: {error}") from None
    count = float(config.get("num_train_timesteps", 1000))
    candidates = ((count, 0.0), (-count, count), (1.0, 0.0), (-1.0, 1.0))
    off, slope, offset = min((float((levels * a + b - times).abs().max()), a, b) for a, b in candidates)
    if off > 1.01 * abs(slope) / 1000 * (1 + (abs(slope) == 1)):
        raise refused(pipeline, f"{type(scheduler).__name__} has times that are no multiple of its noise levels")
    return NoiseSchedule("flow", slope, offset)


def exact_prediction(scheduler: SchedulerMixin, sample: Tensor, timestep: Any, clean: Tensor, step: int) -> Tensor:
    """Objective's target at a step of a scheduler whose latents are `sample`, if they end at `clean`."""
    if not samples_by_diffusion(scheduler):
        level = noise_levels(scheduler.sigmas)[step].to(sample.device, sample.dtype)
        return (sample - clean) / level
    shown = scheduler.scale_model_input(sample, timestep) if hasattr(scheduler, "scale_model_input") else sample
    alpha = scheduler.alphas_cumprod[timestep.long().cpu()].to(sample.device)
    noise = (shown - alpha.sqrt() * clean) / (1 - alpha).sqrt()
    if scheduler.config.get("prediction_type", "epsilon") == "epsilon":
        return noise
    return velocity(clean, noise, alpha.reshape(1))


def one_step(real: Any, current: Callable[[], PipelineRun]) -> Any:
    """Single-step scheduler of the class of `real`, since some pipelines check the class."""
    cls = type(real)
    own: dict[str, object] = {"init_noise_sigma": 1.0}
    # A property hides an instance's attribute of that name, so it is replaced in a subclass.
    if isinstance(getattr(cls, "init_noise_sigma", None), property):
        cls = type(cls.__name__, (cls,), own)
        own = {}
    scheduler: Any = cls.from_config(real.config)

    def set_timesteps(
        num_inference_steps: object = None,
        device: object = None,
        sigmas: object = None,
        mu: float | None = None,
        timesteps: object = None,
        **kwargs: object,
    ) -> None:
        current().mu = mu
        scheduler.num_inference_steps = 1

    def step(model_output: Tensor, timestep: object, sample: Tensor, *args: object, **kwargs: object) -> Any:
        current().handed = model_output, sample
        at_step = current().at_step
        if at_step is None:
            raise StopCall
        return at_step(model_output, sample)

    # On the instance: the type stays that of the real one.
    scheduler.__dict__.update(
        own, set_timesteps=set_timesteps, step=step, scale_model_input=lambda sample, timestep=None: sample
    )
    return scheduler
