"""FLUX.2: a flow-matching transformer over patches that its VAE normalizes, with hidden states of a language
model.

klein reads Qwen3 and samples with classifier-free guidance; dev reads Mistral 3 and embeds the guidance
scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletuner.data.prefetch import references_in
from simpletuner.models.families.flux import Flux, guidance_scale
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching, round_to_bf16_times_1000
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Flux2(ModelFamily):
    """FLUX.2 klein."""

    pipelines = ("Flux2KleinPipeline",)
    float32_inputs = ("timestep", "guidance", "txt_ids", "img_ids")
    # Flux2Transformer2DModel.forward: `timestep.to(hidden_states.dtype) * 1000`.
    round_sigmas_in_bf16 = staticmethod(round_to_bf16_times_1000)
    outputs_vae_latents = True
    objective = flow_matching
    fuses_qkv = True
    most_references = 10  # more than its publisher advises for any of them
    sequence_plan = Flux.sequence_plan

    @classmethod
    def variants(cls) -> tuple[type[ModelFamily], ...]:
        return (Flux2Dev,)

    def default_max_length(self) -> int:
        return 512

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, max_length, 3 D): hidden states of three layers, with padding."""
        embeds, _ = pipeline.encode_prompt(captions, max_sequence_length=self.max_length)
        return {"prompt_embeds": embeds}

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as Flux2KleinPipeline and Flux2Pipeline do."""
        batch, _, height, width = noised_BCHW.shape
        embeds = conditioning["prompt_embeds"].to(noised_BCHW.dtype)
        # dev was published before configs had the key for embedded guidance, so one without it is dev's.
        embeds_guidance = self.config.get("guidance_embeds", True)
        # Positions of references begin with 10, 20, ... in place of 0.
        images = [noised_BCHW, *(each.to(noised_BCHW.dtype) for each in references_in(conditioning))]
        ids = [
            position_ids(batch, *each.shape[-2:], 1, each.device, first=10 * number)
            for number, each in enumerate(images)
        ]
        tokens = model(
            hidden_states=torch.cat([each.flatten(2).transpose(1, 2) for each in images], dim=1),
            timestep=timesteps_B,
            guidance=guidance_scale(self, noised_BCHW) if embeds_guidance else None,
            encoder_hidden_states=embeds,
            txt_ids=position_ids(batch, 1, 1, embeds.shape[1], noised_BCHW.device),
            img_ids=torch.cat(ids, dim=1),
            return_dict=False,
        )[0]
        return unpack(tokens[:, : height * width], Shape(1, height, width))

    def shift_exponent(self, tokens: int, config: Mapping[str, object]) -> float:
        # It also depends on the number of steps here: the pipelines' default of 50.
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return compute_empirical_mu(tokens, num_steps=50)

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        # Flux2KleinPipeline takes negative embeddings, but has no argument `negative_prompt`.
        embeds = {f"negative_{name}": value for name, value in negative.items()}
        return {**positive, **embeds, **sampling.kwargs()}

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return unpack(latents, shape)


class Flux2Dev(Flux2):
    """FLUX.2 dev."""

    pipelines = ("Flux2Pipeline",)
    outputs_vae_latents = False
    tiny_pipeline = ""

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        return {**positive, **sampling.kwargs()}  # guidance is an input of the transformer


def unpack(latents: Tensor, shape: Shape) -> Tensor:
    """Convert tokens (B, L, C), row by row, to latents BCHW; latents that are BCHW already stay."""
    return latents.transpose(1, 2).unflatten(2, shape[1:]) if latents.ndim == 3 else latents


def position_ids(batch: int, rows: int, columns: int, words: int, device: torch.device, first: int = 0) -> Tensor:
    """(first, row, column, word) of each token, shape (batch, rows * columns * words, 4)."""
    axes = [torch.arange(length, device=device) for length in (1, rows, columns, words)]
    return torch.cartesian_prod(axes[0] + first, *axes[1:]).expand(batch, -1, -1)
