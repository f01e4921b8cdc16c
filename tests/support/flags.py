"""Command lines for tests: common flags first, what a test says otherwise after them."""

from __future__ import annotations

from collections.abc import Iterable


def last_wins(arguments: Iterable[str]) -> list[str]:
    """Return arguments without the flags that later ones give another value; the command line refuses both."""
    arguments = list(arguments)
    names = [argument.partition("=")[0] for argument in arguments]
    return [
        argument
        for index, argument in enumerate(arguments)
        if not argument.startswith("--")
        or names[index] == "--validation_prompt"
        or names[index] not in names[index + 1 :]
    ]


ANY_LENGTH = frozenset({"auto", "lumina2", "qwen_image", "sd1x", "sd2x", "sdxl", "z_image"})
"""Families that encode captions as long as they are, or always as 77 tokens."""
TOKENS = 24


def tokens_of(family: str) -> int | None:
    """Return a tokenizer_max_length: with the 512 tokens that others pad captions to, a step costs three times more."""
    return None if family in ANY_LENGTH else TOKENS
