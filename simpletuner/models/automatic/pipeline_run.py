"""A run of a pipeline: values that hooks supply and record, and refusals of other behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady, SettingsError, SimpleTunerError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# Raised by code that is given what it was not written for.
FOREIGN_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class StopCall(BaseException):
    """Ends a pipeline's call once all was seen. Not an Exception, which modular pipelines would log."""


REFUSED = "cannot be trained by its own call"


def refused(pipeline: DiffusionPipeline, why: str) -> SettingsError:
    """Return the error for a pipeline that cannot be trained without a class of its own."""
    name = pipeline if isinstance(pipeline, str) else type(pipeline).__name__
    return SettingsError(f"{name} {REFUSED}: {why}", "a class of your own can: docs/families.md has a complete one")


def without_package(pipeline: str, error: NameError) -> SimpleTunerError:
    """Error for a name that a pipeline's call does not find: diffusers imports some packages if it can."""
    package = "torchvision" if error.name == "transforms" else error.name  # of it, for Anima's transformer
    from diffusers.utils import import_utils  # 0.3 CPU s, and a family that has a class asks nothing here

    if hasattr(import_utils, f"is_{package}_available"):
        return EnvironmentNotReady(f"{pipeline} needs the package {package}", f"pip install {package}")
    return refused(pipeline, f"its own call fails with NameError: {first_line(error)}")


@dataclass
class PipelineRun:
    """Values that hooks supply and record during one run."""

    text: Sequence[Any] | None = None
    """Returned by `encode_prompt`, one for each of its calls; None: it really encodes."""
    noise: Tensor | None = None
    """Returned by the first `randn_tensor`; None: it really draws."""
    time: Tensor | None = None
    """Time of each sample (B), as the pipeline's scheduler has it; None: the pipeline's own loop."""
    denoise: Callable[[dict[str, Any]], Any] | None = None
    """Gets all inputs of the denoiser by name."""
    at_step: Callable[..., Any] | None = None
    """Called as `at_step(scheduler, step, ...)` in place of the scheduler's `step`; None: `step` ends the
    run."""
    decode: Callable[[Tensor], Any] | None = None
    """Gets the latents for the VAE; None: the VAE's own `decode`."""
    latents: Sequence[Tensor] | None = None
    """Latents of the given images as the VAE makes them, (B, ...) each, returned by its `encode`; None: as
    `encodes` says."""
    encodes: Literal["zeros", "mean", "drawn", "nothing"] = "zeros"
    """Result of the VAE's `encode`: zeros, the mean of the posterior, what the pipeline draws from it, or the
    end of the run."""
    has_images: bool = False
    stop_at_noise: bool = False
    encoded: list[Any] = field(default_factory=list)
    drawn: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of noise that were drawn before the denoiser's first call."""
    shown: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of pixels that the VAE was given."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Inputs of the denoiser, by name."""
    handed: tuple[Tensor, Tensor] | None = None
    """Prediction and latents, as the scheduler's `step` gets them."""
    mu: float | None = None
    """The shift that a scheduler with dynamic shifting gets."""


class EncodedImage(tuple[object]):
    """Output of a VAE's `encode`, whose posterior is a point."""

    @property
    def latent_dist(self) -> object:
        return self[0]


@dataclass(frozen=True)
class Point:
    """Distribution that is one value."""

    latents: Tensor

    def mode(self) -> Tensor:
        return self.latents

    def sample(self, generator: object = None) -> Tensor:
        return self.latents


class StandIn:
    """Stand-in for a component: its class and attributes, but calls of our own."""

    dtype = torch.float32  # it computes in float32, whatever the module does

    def __init__(self, module: object, **methods: Callable[..., object]) -> None:
        self.module = module
        self.__dict__.update(methods)

    # SANA-Video scales latents by its VAE's statistics only if that is an instance of the known class.
    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.module)

    def __getattr__(self, name: str) -> object:
        return getattr(self.module, name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.__dict__["call"](*args, **kwargs)


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:120]


def tensors_of(given: Mapping[str, object]) -> dict[str, Tensor]:
    """Tensors among a denoiser's inputs by name, including tensors in dicts and lists."""
    found: dict[str, Tensor] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, Mapping):
            found |= tensors_of(value)
        elif isinstance(value, list | tuple):
            found |= tensors_of({f"{name}[{number}]": each for number, each in enumerate(value)})
    return found
