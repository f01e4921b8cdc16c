"""What a model family answers. Exactly these questions, because nothing else in the program may depend on a family:
what to build, how text and pixels become tensors, what the denoiser is shown, and how its pipeline draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from simpletuner.data.geometry import Geometry, Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletuner.models.objectives import Objective
    from simpletuner.models.vae import KlVae
    from simpletuner.settings.sections import Settings

Conditioning = dict[str, "Tensor"]
"""What a denoiser is given besides latents and time, by meaning; the first axis is the batch."""


@dataclass(frozen=True)
class Sampling:
    """How one picture is drawn: size in px, number of denoising steps, guidance scale, seed."""

    size: Size
    steps: int
    guidance: float
    seed: int

    def arguments(self) -> dict[str, Any]:
        """Return what every pipeline of diffusers is told; it answers with latents."""
        import torch

        return {
            "width": self.size[0],
            "height": self.size[1],
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "generator": torch.Generator().manual_seed(self.seed),
            "output_type": "latent",
        }


class TextEncoder(Protocol):
    """Captions to tensors, by diffusers' own pipeline."""

    def encode(self, captions: Sequence[str]) -> Conditioning:
        """Return what each caption gives; the first axis is the caption."""
        ...


class Family(Protocol):
    """A model family, opened from one pipeline folder in diffusers format."""

    key: str
    folder: Path
    scheduler_config: dict[str, Any]
    """The scheduler as it draws and is exported; a prediction type that the settings override is in it."""
    denoiser_name: str
    """Name of the denoiser in the pipeline and of its folder: `unet` or `transformer`."""
    blocks: tuple[str, ...]
    """Classes that become one sharding unit each; they repeat and do not contain one another."""
    max_length: int | None
    """Longest prompt in tokens, where the user may choose it."""

    def __init__(self, folder: Path, settings: Settings) -> None: ...

    @staticmethod
    def build_tiny(folder: Path) -> None:
        """Write a complete small pipeline with random weights."""
        ...

    def denoiser(self) -> nn.Module:
        """Return the denoiser as its config.json has it, parameters on the meta device."""
        ...

    def objective(self) -> Objective:
        """Return what the denoiser is trained towards, as its scheduler and the settings say."""
        ...

    def vae(self, device: torch.device) -> KlVae:
        """Load the VAE."""
        ...

    def text_encoder(self, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        """Load tokenizers and text encoders."""
        ...

    def unconditional(self, empty_caption: Conditioning) -> Conditioning:
        """Return what stands for `no caption`, given the encoding of the empty one."""
        ...

    def picture_conditioning(self, geometry: Geometry) -> Conditioning:
        """Return what the denoiser is told about one picture's size and crop; no batch axis."""
        ...

    def predict(self, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the denoiser as its pipeline does and return its answer as BCHW; noisy_BCHW sets the dtype."""
        ...

    def draw(
        self, model: nn.Module, vae: KlVae, sampling: Sampling, positive: Conditioning, negative: Conditioning
    ) -> Tensor:
        """Return the latents (1CHW) of one picture, drawn by diffusers' own pipeline."""
        ...
