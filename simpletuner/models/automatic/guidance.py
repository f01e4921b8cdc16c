"""Guidance while sampling: which of a run's text is of the prompt, and which of the negative prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from simpletuner.models.automatic.findings import Findings, GuidedText
from simpletuner.models.automatic.seams import EnteredPipeline
from simpletuner.models.automatic.text import all_equal
from simpletuner.private_api.of_torch import tree_flatten
from simpletuner.settings.values.shape import Shape

GUIDED = 5.0
"""A scale above which every pipeline guides."""


def guided_arguments(found: Findings, scale: float) -> dict[str, Any]:
    """Return the arguments of a run with guidance, whose scale is 1 for none, as in most pipelines."""
    scale -= found.arguments.get("guidance_scale", 1.0) == 0  # Krea 2 and Z-Image count from 0
    return found.arguments | {"guidance_scale": scale, "true_cfg_scale": scale}


def encode_guided(entered: EnteredPipeline, prompt: str, negative: str | None, shape: Shape, found: Findings) -> Any:
    """Return the leaves of the text for a prompt and a negative one, with guidance on, and their structure."""
    given = {} if negative is None else {"negative_prompt": [negative]}
    return tree_flatten(entered.encode([prompt], shape, guided=True, **guided_arguments(found, GUIDED), **given))


def find_guided_text(entered: EnteredPipeline, shape: Shape, found: Findings, captions: Sequence[str]) -> Findings:
    """Find by three captions which part of a guided run's text is of the prompt, and which of the negative prompt."""
    count = len(found.text.names)
    prompt, other, negative = captions
    own, other_prompt, other_negative = (
        encode_guided(entered, *both, shape, found) for both in ((prompt, negative), (other, negative), (prompt, other))
    )
    if not own[1] == other_prompt[1] == other_negative[1]:
        return replace(found, unguided="its text has no fixed structure")
    changed = [
        {number for number, (a, b) in enumerate(zip(own[0], other[0], strict=True)) if not all_equal((a, b))}
        for other in (other_prompt, other_negative)
    ]
    positive, negated = (tuple(sorted(each)) for each in changed)
    # A pipeline without negative prompts (FLUX.2 klein) guides away from a text of its own.
    expected = count if "negative_prompt" in entered.parameters else 0
    if len(positive) != count or len(negated) != expected or {*positive} & {*negated}:
        return replace(found, unguided="its text for guidance is not that of two captions")
    return replace(found, guidance=GuidedText(own[1], tuple(own[0]), positive, negated))


def encode_no_caption(entered: EnteredPipeline, guidance: GuidedText, shape: Shape, found: Findings) -> list[Tensor]:
    """Return the text of no negative prompt where a pipeline takes zeros for it (SDXL), else of an empty one."""
    chosen: list[Tensor] = []
    for negative in (None, ""):
        leaves, structure = encode_guided(entered, "a photo", negative, shape, found)
        given = [leaves[number] for number in guidance.negative] if structure == guidance.structure else []
        # Blocks of SD3 return None for no negative prompt.
        chosen = given if all(isinstance(leaf, Tensor) for leaf in given) else []
        if negative is None and chosen and not any(leaf.any() for leaf in chosen if leaf.is_floating_point()):
            break
    return chosen
