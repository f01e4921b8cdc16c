"""Ideogram 4: a flow-matching transformer over text and image, guided by a second transformer.

The first is trained. The second predicts without a text, and samples are guided away from it: it stays as published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle
from torch.nn.utils.rnn import pad_sequence

from simpletuner.errors import SettingsError
from simpletuner.models.families.flux2 import unpack
from simpletuner.models.family.base import ModelFamily
from simpletuner.models.family.objectives import flow_matching, round_time_to_bf16
from simpletuner.models.family.sampling import SamplingParams
from simpletuner.models.family.text_encoding import Conditioning
from simpletuner.models.family.two_denoisers import load_frozen
from simpletuner.models.family.vae import Vae
from simpletuner.settings.values.shape import Shape

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

UNCONDITIONAL = "unconditional_transformer"
# Values of Ideogram4Pipeline's inputs, and its shift's reference: 512 x 512 px.
FIRST_POSITION, PADDING, IMAGE, TEXT, UNSHIFTED_PX = 65536, -1, 2, 3, 512


class Ideogram4(ModelFamily):
    """Ideogram 4."""

    pipelines = ("Ideogram4Pipeline",)
    objective = flow_matching
    other_denoiser = UNCONDITIONAL
    text_width = "llm_features_dim"
    padding_mask = "prompt_embeds_mask"
    float32_inputs = ()  # its time is in the transformer's dtype
    round_sigmas_in_bf16 = staticmethod(round_time_to_bf16)
    shifts_levels = True

    def choose_denoiser(self) -> None:
        self._frozen: dict[str, nn.Module] = {}

    def default_max_length(self) -> int:
        return 2048

    def vae(self, device: torch.device) -> Vae:
        return PatchesFirst(self.folder / "vae", device, self.settings.model)

    def sampling_components(self, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        if not self._frozen:
            folder, variant = self.folder / UNCONDITIONAL, self.settings.model.variant
            self._frozen = {UNCONDITIONAL: load_frozen(folder, variant, device, dtype, self.float32_inputs)}
        return self._frozen

    def encode_prompts(self, pipeline: DiffusionPipeline, captions: list[str]) -> Conditioning:
        """Encode to prompt_embeds (B, L, 13 D), 13 layers of Qwen3-VL, zero after captions, and mask (B, L).

        Raises SettingsError for a caption that is longer than the pipeline takes.
        """
        encoded = []
        for caption in captions:
            # The pipeline would pad to 2,048 tokens, a hundred times a caption's; nothing attends to them.
            length = min(count_tokens(pipeline.tokenizer, caption), self.max_length)
            try:
                embeds, _, _, _ = pipeline.encode_prompt([caption], 0, 0, length, pipeline.device)
            except ValueError as error:
                raise SettingsError(
                    f"a caption of {len(caption):,} characters: {error}",
                    "shorten it, or raise tokenizer_max_length",
                ) from None
            encoded.append(embeds[0])
        masks = [torch.ones(len(each), dtype=torch.long, device=each.device) for each in encoded]
        return {
            "prompt_embeds": pad_sequence(encoded, batch_first=True),
            "prompt_embeds_mask": pad_sequence(masks, batch_first=True),
        }

    def predict(self, model: nn.Module, noised_BCHW: Tensor, timesteps_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Call the transformer as Ideogram4Pipeline does: time 1 at the image, an output of latents - noise.

        Padding lies between text and image, where the pipeline has it before the text: nothing attends to it.
        """
        shape = Shape(1, *noised_BCHW.shape[-2:])
        embeds, ids = packed(conditioning, shape, noised_BCHW.device)
        length = conditioning["prompt_embeds"].shape[1]
        tokens = model(
            hidden_states=pad(noised_BCHW.flatten(2).transpose(1, 2), (0, 0, length, 0)),
            timestep=(1 - timesteps_B).to(noised_BCHW.dtype),
            encoder_hidden_states=embeds.to(noised_BCHW.dtype),
            **ids,
            return_dict=False,
        )[0]
        return -unpack(tokens[:, length:], shape)

    def mu(self, shape: Shape, config: Mapping[str, object]) -> float:
        # 0 for 512 x 512 px.
        cell = self.cell
        pixels = shape.height * cell.height * shape.width * cell.width
        return 0.5 * math.log(pixels / UNSHIFTED_PX**2)

    def pipeline_kwargs(
        self, positive: Conditioning, negative: Conditioning, sampling: SamplingParams
    ) -> dict[str, object]:
        kwargs = sampling.kwargs() | {"guidance_schedule": None}
        if positive:  # `enter_pipeline` has its embeddings
            kwargs |= {"prompt": "x", "max_sequence_length": positive["prompt_embeds"].shape[1]}
        return kwargs

    def enter_pipeline(self, pipeline: DiffusionPipeline, positive: Conditioning) -> None:
        """Give the pipeline, whose call takes no embeddings, those of a prompt."""

        def encode_prompt(grid_h: int, grid_w: int, **_: object) -> tuple[Tensor, ...]:
            embeds, ids = packed(positive, Shape(1, grid_h, grid_w), positive["prompt_embeds"].device)
            return embeds, ids["position_ids"], ids["segment_ids"], ids["indicator"]

        pipeline.encode_prompt = encode_prompt

    def unpack_latents(self, latents: Tensor, shape: Shape) -> Tensor:
        return unpack(latents, shape)


def count_tokens(tokenizer: Any, caption: str) -> int:
    """Count the tokens of a caption in the message that Ideogram4Pipeline makes of it."""
    messages = [{"role": "user", "content": [{"type": "text", "text": caption}]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


class PatchesFirst(Vae):
    """FLUX.2's VAE with statistics of 2x2 patches whose places come before their channels."""

    def normalize(self, latents: Tensor) -> Tensor:
        mean, scale = self._statistics(latents.ndim)
        patches = pixel_unshuffle(latents.to(self.device).float(), self.patch)
        return (patches.unflatten(1, (-1, self.patch**2)).transpose(1, 2).flatten(1, 2) - mean) * scale

    def denormalize(self, latents: Tensor) -> Tensor:
        mean, scale = self._statistics(latents.ndim)
        patches = latents.to(self.device).float() / scale + mean
        return pixel_shuffle(patches.unflatten(1, (self.patch**2, -1)).transpose(1, 2).flatten(1, 2), self.patch)


def packed(conditioning: Conditioning, shape: Shape, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the embeddings of texts and an image of `shape` in latent cells, (B, L + tokens, D), and the
    places, the segments and the kinds of all tokens."""
    embeds = conditioning["prompt_embeds"].to(device)
    batch, length = embeds.shape[:2]
    is_text = conditioning["prompt_embeds_mask"].to(device).bool()
    axes = [torch.arange(each, device=device) for each in (1, shape.height, shape.width)]
    image = (torch.cartesian_prod(*axes) + FIRST_POSITION).expand(batch, -1, -1)
    text = torch.arange(length, device=device)[None, :, None].expand(batch, -1, 3) * is_text[..., None]
    whole = (0, shape.area)
    ids = {
        "position_ids": torch.cat([text, image], dim=1),
        "segment_ids": pad(is_text.long().masked_fill(~is_text, PADDING), whole, value=1),
        "indicator": pad(is_text.long() * TEXT, whole, value=IMAGE),
    }
    return pad(embeds, (0, 0, *whole)), ids
