"""Stable Diffusion XL: a U-Net with two CLIP encoders, told each picture's original size and crop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.data.geometry import Geometry
from simpletuner.models.components import build_on_meta, inputs_cast, read_json
from simpletuner.models.family import Conditioning, Sampling
from simpletuner.models.objectives import Diffusion
from simpletuner.models.vae import KlVae
from simpletuner.settings.sections import Settings


class SdxlText:
    """CLIP-L and CLIP-G through the pipeline's own `encode_prompt`."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, variant: str | None) -> None:
        from diffusers import StableDiffusionXLPipeline

        self.pipeline = StableDiffusionXLPipeline.from_pretrained(
            folder, unet=None, vae=None, dtype=dtype, use_safetensors=True, variant=variant
        ).to(device)

    @torch.no_grad()
    def encode(self, captions: Sequence[str]) -> Conditioning:
        """Return prompt_embeds (B, 77, D) and pooled (B, P)."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False)
        return {"prompt_embeds": embeds.cpu(), "pooled": pooled.cpu()}


class Sdxl:
    """The SDXL family."""

    key = "sdxl"
    denoiser_name = "unet"
    blocks = ("BasicTransformerBlock", "ResnetBlock2D")
    max_length = None

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.scheduler_config = read_json(folder / "scheduler" / "scheduler_config.json")
        if settings.model.prediction_type:
            self.scheduler_config["prediction_type"] = settings.model.prediction_type
        self.zero_for_no_caption = read_json(folder / "model_index.json").get("force_zeros_for_empty_prompt", True)

    @staticmethod
    def build_tiny(folder: Path) -> None:
        """Write a complete small SDXL pipeline with random weights."""
        from simpletuner.models.tiny import build_tiny_sdxl

        build_tiny_sdxl(folder)

    def denoiser(self) -> nn.Module:
        """Return the U-Net on the meta device."""
        from diffusers import UNet2DConditionModel

        return build_on_meta(UNet2DConditionModel, self.folder / "unet")

    def objective(self) -> Diffusion:
        """Return the objective with the scheduler's betas and prediction type."""
        from diffusers import DDPMScheduler

        scheduler: Any = DDPMScheduler.from_config(self.scheduler_config)
        snr_gamma = self.settings.objective.snr_gamma
        return Diffusion(scheduler.alphas_cumprod, scheduler.config.prediction_type, snr_gamma)

    def vae(self, device: torch.device) -> KlVae:
        """Load the VAE."""
        return KlVae(self.folder / "vae", device, self.settings.model.vae_dtype)

    def text_encoder(self, device: torch.device, dtype: torch.dtype) -> SdxlText:
        """Load both tokenizers and text encoders."""
        return SdxlText(self.folder, device, dtype, self.settings.model.variant)

    def unconditional(self, empty_caption: Conditioning) -> Conditioning:
        """Return zeros where the pipeline was published so (SDXL base), else the empty caption."""
        if not self.zero_for_no_caption:
            return empty_caption
        return {name: torch.zeros_like(value) for name, value in empty_caption.items()}

    def picture_conditioning(self, geometry: Geometry) -> Conditioning:
        """Return time_ids: original height and width, crop top and left, target height and width; float32, since
        bf16 would round every number above 256 (Podell et al. 2023, arXiv:2307.01952, section 2.2)."""
        pairs = (geometry.original, geometry.crop_left_top, geometry.target)
        return {"time_ids": torch.tensor([float(value) for pair in pairs for value in reversed(pair)])}

    def predict(self, model: nn.Module, noisy_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the U-Net as StableDiffusionXLPipeline does."""
        dtype = noisy_BCHW.dtype
        return model(
            noisy_BCHW,
            timesteps_B,
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            added_cond_kwargs={"text_embeds": conditioning["pooled"].to(dtype), "time_ids": conditioning["time_ids"]},
            return_dict=False,
        )[0]

    def draw(
        self, model: nn.Module, vae: KlVae, sampling: Sampling, positive: Conditioning, negative: Conditioning
    ) -> Tensor:
        """Draw one picture's latents with the pipeline's own scheduler."""
        from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

        pipeline: Any = StableDiffusionXLPipeline(
            vae=vae.model,
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            unet=model,
            scheduler=EulerDiscreteScheduler.from_config(self.scheduler_config),
            add_watermarker=False,
        )
        pipeline.set_progress_bar_config(disable=True)
        with inputs_cast(model, positive["prompt_embeds"].dtype, leave=("time_ids",)):
            return pipeline(
                prompt_embeds=positive["prompt_embeds"],
                pooled_prompt_embeds=positive["pooled"],
                negative_prompt_embeds=negative["prompt_embeds"],
                negative_pooled_prompt_embeds=negative["pooled"],
                **sampling.arguments(),
            ).images
