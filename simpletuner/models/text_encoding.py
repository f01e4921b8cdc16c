"""Captions to embeddings and masks, by a pipeline's own `encode_prompt`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from simpletuner.models.family import Conditioning, Family


def encoded_with_mask(family: Family, pipeline: Any, captions: list[str], **options: Any) -> Conditioning:
    """Return prompt_embeds (B, max_length, D) and prompt_attention_mask (B, max_length).

    The empty caption is encoded as the pipeline encodes its own negative prompt, without the instruction that some put
    before prompts. `options` go to `encode_prompt`, which answers embeddings, mask, and both of the negative prompt.
    """
    length = family.max_length
    embeds, mask, _, _ = pipeline.encode_prompt(
        captions, do_classifier_free_guidance=False, max_sequence_length=length, **options
    )
    empty = torch.tensor([caption == "" for caption in captions], device=embeds.device)
    if empty.any():
        _, _, embeds[empty], mask[empty] = pipeline.encode_prompt("", max_sequence_length=length)
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask}
