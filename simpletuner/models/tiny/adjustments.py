"""Adjustments that make random weights of a tiny pipeline behave like trained ones; each is named by a preset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from simpletuner.models.tiny.encoders import load_vae

if TYPE_CHECKING:
    from diffusers import AuraFlowPipeline, Flux2KleinPipeline, LTX2Pipeline, LTXConditionPipeline, ZImagePipeline


def strengthen_text(pipeline: AuraFlowPipeline) -> None:
    # With the random weights as they are the gates are so small that text changes nothing.
    pipeline.transformer.time_step_proj.linear_2.weight.data.mul_(20)


def fill_padding(pipeline: ZImagePipeline) -> None:
    for padding in (pipeline.transformer.x_pad_token, pipeline.transformer.cap_pad_token):
        padding.data.normal_(std=0.3)  # the norm of zeros has gradients in the hundreds


def set_latent_statistics(pipeline: LTXConditionPipeline | LTX2Pipeline) -> None:
    channels = pipeline.vae.config.latent_channels
    pipeline.vae.register_buffer("latents_mean", torch.linspace(-0.1, 0.1, channels))
    pipeline.vae.register_buffer("latents_std", torch.linspace(0.25, 0.35, channels))


def use_patch_statistics(pipeline: Flux2KleinPipeline) -> None:
    """Make the package's VAE one of FLUX.2, with statistics of 2x2 patches instead of a scaling factor."""
    from diffusers import AutoencoderKLFlux2

    trained = load_vae()
    vae = AutoencoderKLFlux2(**AutoencoderKLFlux2.extract_init_dict(dict(trained.config))[0])
    vae.bn.running_mean.normal_(std=0.1)
    vae.bn.running_var.fill_(trained.config.scaling_factor**-2)
    vae.load_state_dict(trained.state_dict() | vae.bn.state_dict(prefix="bn."))
    pipeline.register_modules(vae=vae)
