"""Variants of a caption: the text that rules leave, and its parts in other orders."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from simpletuner.data.config.caption_rules import CaptionShuffle, compile_rule
from simpletuner.data.sampler.permutation import hash_key, permuted

SEPARATORS = {"comma": (",", ", "), "space": (None, " "), "period": (".", ". ")}
"""Argument of `str.split`, and the string that joins tags."""


@cache
def compile_rules(rules: tuple[str, ...]) -> tuple[Callable[[str], str], ...]:
    return tuple(map(compile_rule, rules))


def vary(caption: str, rules: tuple[str, ...], shuffle: CaptionShuffle | None) -> list[str]:
    """Return what becomes of a caption: one text, or several that are shown equally often."""
    for rule in compile_rules(rules):
        caption = rule(caption)
    if rules:  # what is removed leaves its spaces on both sides
        caption = re.sub(r"[ \t]{2,}", " ", caption).strip()
    return shuffle_parts(caption, shuffle) if shuffle and shuffle.enable else [caption]


def shuffle_parts(caption: str, shuffle: CaptionShuffle) -> list[str]:
    """Return a caption's parts in other orders, which depend on the seed and the caption alone."""
    separator, glue = SEPARATORS[shuffle.split_on]
    parts = [part.strip() for part in caption.split(separator) if part.strip()]
    fixed, moved = parts[: shuffle.position_start], parts[shuffle.position_start :]
    if len(moved) < 2:
        return [caption]
    end = "." if shuffle.split_on == "period" and caption.endswith(".") else ""
    numbers = np.arange(shuffle.count * len(moved), dtype=np.uint64)
    orders = permuted(numbers, len(moved), hash_key(shuffle.seed, caption)).reshape(shuffle.count, -1)
    variants = [glue.join([*fixed, *(moved[place] for place in order)]) + end for order in orders.tolist()]
    return list(dict.fromkeys([caption] * shuffle.include_original + variants))
