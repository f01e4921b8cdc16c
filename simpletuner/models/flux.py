"""Flux.1: a flow-matching transformer over 2x2 latent patches, with CLIP-L pooled and T5-XXL text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.geometry import Geometry
from simpletuner.models.components import build_on_meta, read_json
from simpletuner.models.family import Conditioning, Sampling
from simpletuner.models.objectives import FlowMatching
from simpletuner.models.vae import KlVae
from simpletuner.settings.sections import Settings


def packed(latents_BCHW: Tensor) -> Tensor:
    """Return 2x2 patches as tokens (B, H/2 * W/2, 4C), channels outermost within a token."""
    b, c, h, w = latents_BCHW.shape
    patches = latents_BCHW.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(b, (h // 2) * (w // 2), c * 4)


def unpacked(tokens_BLD: Tensor, height: int, width: int) -> Tensor:
    """Return tokens as latents (B, C, height, width): the inverse of `packed`."""
    b, _, d = tokens_BLD.shape
    patches = tokens_BLD.view(b, height // 2, width // 2, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(b, d // 4, height, width)


def position_ids(height: int, width: int) -> Tensor:
    """Return (0, row, column) of each patch, shape (height/2 * width/2, 3)."""
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()


class FluxText:
    """CLIP-L and T5-XXL through the pipeline's own `encode_prompt`."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, variant: str | None, max_length: int
    ) -> None:
        from diffusers import FluxPipeline

        self.max_length = max_length
        self.pipeline = FluxPipeline.from_pretrained(
            folder, transformer=None, vae=None, dtype=dtype, use_safetensors=True, variant=variant
        ).to(device)

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> Conditioning:
        """Return prompt_embeds (B, max_length, D) and pooled (B, P)."""
        embeds, pooled, _ = self.pipeline.encode_prompt(list(captions), None, max_sequence_length=self.max_length)
        return {"prompt_embeds": embeds.cpu(), "pooled": pooled.cpu()}


class Flux:
    """The Flux.1 family: dev and its kin with embedded guidance, schnell without."""

    key = "flux"
    denoiser_name = "transformer"
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.scheduler_config = read_json(folder / "scheduler" / "scheduler_config.json")
        self.has_guidance = bool(read_json(folder / "transformer" / "config.json").get("guidance_embeds"))
        # schnell, the one without guidance, was distilled on prompts of 256 tokens
        self.max_length = settings.data.tokenizer_max_length or (512 if self.has_guidance else 256)

    @staticmethod
    def build_tiny(folder: Path) -> None:
        """Write a complete small Flux pipeline with random weights."""
        from simpletuner.models.tiny import build_tiny_flux

        build_tiny_flux(folder)

    def denoiser(self) -> nn.Module:
        """Return the transformer on the meta device."""
        from diffusers import FluxTransformer2DModel

        return build_on_meta(FluxTransformer2DModel, self.folder / "transformer")

    def objective(self) -> FlowMatching:
        """Return flow matching with the settings' noise levels."""
        objective = self.settings.objective
        return FlowMatching(
            objective.flow_schedule_shift, objective.flow_sigmoid_scale, objective.flow_use_uniform_schedule
        )

    def vae(self, device: torch.device) -> KlVae:
        """Load the VAE."""
        return KlVae(self.folder / "vae", device, self.settings.model.vae_dtype)

    def text_encoder(self, device: torch.device, dtype: torch.dtype) -> FluxText:
        """Load both tokenizers and text encoders."""
        return FluxText(self.folder, device, dtype, self.settings.model.variant, self.max_length)

    def unconditional(self, empty_caption: Conditioning) -> Conditioning:
        """Return the empty caption, which is what Flux was trained with."""
        return empty_caption

    def picture_conditioning(self, geometry: Geometry) -> Conditioning:
        """Return nothing: Flux is not told sizes or crops."""
        return {}

    def predict(self, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as FluxPipeline does."""
        batch, _, height, width = noisy_BCHW.shape
        dtype, device = noisy_BCHW.dtype, noisy_BCHW.device
        embeds = conditioning["prompt_embeds"].to(dtype)
        guidance = torch.full((batch,), self.settings.objective.flux_guidance_value, device=device)
        tokens = model(
            hidden_states=packed(noisy_BCHW),
            timestep=timesteps_B,
            guidance=guidance if self.has_guidance else None,
            pooled_projections=conditioning["pooled"].to(dtype),
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=device, dtype=dtype),
            img_ids=position_ids(height, width).to(device, dtype),
            return_dict=False,
        )[0]
        return unpacked(tokens, height, width)

    def draw(
        self, model: nn.Module, vae: KlVae, sampling: Sampling, positive: Conditioning, negative: Conditioning
    ) -> Tensor:
        """Draw one picture's latents with the pipeline's own scheduler; guidance is embedded, `negative` unused."""
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        pipeline: Any = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler.from_config(self.scheduler_config),
            vae=vae.model,
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=model,
        )
        pipeline.set_progress_bar_config(disable=True)
        tokens = pipeline(
            prompt_embeds=positive["prompt_embeds"],
            pooled_prompt_embeds=positive["pooled"],
            **sampling.arguments(),
        ).images
        factor = pipeline.vae_scale_factor
        return unpacked(tokens, 2 * (sampling.size[1] // (factor * 2)), 2 * (sampling.size[0] // (factor * 2)))
