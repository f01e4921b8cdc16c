"""Captions to embeddings and masks, by a pipeline's own `encode_prompt`, and the cleaning of text that CLIP
expects.

OpenAI's tokenizer (`basic_clean` of clip/simple_tokenizer.py) and transformers' up to 4 put captions through
ftfy and unescaped HTML before they counted tokens, so Stable Diffusion and FLUX have seen straight quotes
alone. Language models write curly ones, which are other tokens. Of ftfy it is what exchanges characters;
broken encodings are not repaired.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final
from unicodedata import normalize

import torch
from PIL.Image import Image
from torch import Tensor

from simpletuner.errors import EnvironmentNotReady, SettingsError, is_out_of_memory
from simpletuner.models.folder.malformed import CHECK_COPY, reason, translate_load_errors

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from simpletuner.models.family.base import ModelFamily

CLIP_TOKENIZERS: Final = ("CLIPTokenizer", "CLIPTokenizerFast")
ENTITIES: Final = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&apos;": "'", "&nbsp;": "\xa0", "&amp;": "&"}
LIGATURES: Final = "ĲĳǱǲǳǄǅǆǇǈǉǊǋǌﬀﬁﬂﬃﬄﬅﬆ"
WIDE_AND_NARROW: Final = (*range(0xFF01, 0xFFA0), 0x3000)
"""Latin letters and signs of the width of Chinese ones, and Japanese ones of the width of Latin ones."""


@cache
def replacements() -> Mapping[str, str]:
    """Return regular expressions and what replaces them, in this order."""
    letters = {ord(letter): {"ﬅ": "ſt"}.get(letter, normalize("NFKC", letter)) for letter in LIGATURES}
    letters |= {code: normalize("NFKC", chr(code)) for code in WIDE_AND_NARROW}
    return {
        **{re.escape(entity): sign for entity, sign in ENTITIES.items()},
        **{chr(code): letter for code, letter in letters.items() if letter != chr(code)},
        "[\u02bc\u2018-\u201b]": "'",
        "[\u201c-\u201f]": '"',
    }


@cache
def any_replaced() -> re.Pattern[str]:
    return re.compile("|".join(replacements()))


def has_clip(index: Mapping[str, object]) -> bool:
    """True if the pipeline's tokenizer number `index` is CLIP's."""
    return any(isinstance(value, list) and value[-1:] and value[-1] in CLIP_TOKENIZERS for value in index.values())


def is_cleaned(text: str) -> bool:
    """True if CLIP's tokenizers give a text other tokens than transformers 5 alone does."""
    return any_replaced().search(text) is not None


def clean_texts(pipeline: DiffusionPipeline) -> None:
    """Clean the input of CLIP's tokenizers in a pipeline; other tokenizers were trained without."""
    from tokenizers import Regex, normalizers

    for part in pipeline.components.values():
        if type(part).__name__ in CLIP_TOKENIZERS and (backend := getattr(part, "backend_tokenizer", None)) is not None:
            rules = [normalizers.Replace(Regex(pattern), sign) for pattern, sign in replacements().items()]
            own = [backend.normalizer] if backend.normalizer is not None else []
            backend.normalizer = normalizers.Sequence([*rules, *own])


Conditioning = dict[str, Tensor]
"""Inputs of a denoiser besides latents and time, under the names that its pipeline uses. `prompt_embeds`
is always there: its dtype is the one to sample in. The first axis is the batch. Texts of different lengths
are padded with zeros, so a mask must be among the tensors."""


class TextEncoder:
    """Tokenizers and text encoders of a pipeline, loaded onto a device."""

    def __init__(self, family: ModelFamily, device: torch.device, dtype: torch.dtype) -> None:
        self.family = family
        with translate_load_errors(family.folder):
            self.pipeline = family.load_pipeline(vae=None, dtype=dtype, with_text=True).to(device)
        clean_texts(self.pipeline)

    @torch.no_grad()
    def encode(self, captions: Sequence[str], references: Sequence[Image] = ()) -> Conditioning:
        """Encode captions, with references that all of them are about; the first axis is the caption, on the
        CPU.

        Raises EnvironmentNotReady for what damaged numbers of a tokenizer lead to, such as a length of 1e20
        tokens or one that is not the other tokenizer's, and SettingsError for a user's family that returns no
        `prompt_embeds`.
        """
        try:
            if references:
                encoded = self.family.encode_edits(self.pipeline, list(captions), references)
            else:
                encoded = self.family.encode_prompts(self.pipeline, list(captions))
        except (ArithmeticError, LookupError, ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and (type(error) is not RuntimeError or is_out_of_memory(error)):
                raise  # torch's own classes are of the device
            why = f"the text encoders of {self.family.folder} cannot encode: {reason(error)}"
            raise EnvironmentNotReady(why, CHECK_COPY) from error
        if "prompt_embeds" not in encoded:
            raise SettingsError(
                f"{type(self.family).__name__}.encode_prompts returns {', '.join(encoded) or 'nothing'}, but no "
                "prompt_embeds",
                "return the text embeddings as `prompt_embeds`: their dtype is the one that images are sampled in",
            )
        return {name: value.cpu() for name, value in encoded.items()}


def encode_with_mask(
    family: ModelFamily, pipeline: DiffusionPipeline, captions: list[str], **options: object
) -> Conditioning:
    """Encode to prompt_embeds (B, max_length, D) and prompt_attention_mask (B, max_length).

    `options` go to `encode_prompt`, which must return embeddings, mask, and both of the negative prompt.
    """
    length = family.max_length
    embeds, mask, _, _ = pipeline.encode_prompt(
        captions, do_classifier_free_guidance=False, max_sequence_length=length, **options
    )
    # Sana and Lumina 2 put an instruction before prompts, but not before the negative prompt. The empty
    # caption means `no caption`, so it must be encoded the way the pipeline encodes its negative prompt.
    empty = torch.tensor([caption == "" for caption in captions], device=embeds.device)
    if empty.any():
        _, _, embeds[empty], mask[empty] = pipeline.encode_prompt("", max_sequence_length=length)
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask}
