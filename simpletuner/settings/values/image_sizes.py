"""Sizes of validation images as text: EDGE or WIDTHxHEIGHT in px, or several of them."""

from __future__ import annotations

import re

SIZE = re.compile(r"[1-9]\d{0,5}(x[1-9]\d{0,5})?", re.ASCII)


def normalize_sizes(text: str) -> str:
    """Return sizes without blanks and in lower case. Raises ValueError for what is no list of different sizes."""
    words = text.lower().replace(" ", "").split(",")
    if text and not all(map(SIZE.fullmatch, words)):
        raise ValueError("write an edge such as 1024, 1216x832, or several sizes, such as 1024x1024,1280x768")
    sizes = parse_sizes(",".join(words))
    if twice := next((size for size in sizes if sizes.count(size) > 1), None):
        raise ValueError(f"{twice[0]}x{twice[1]} stands there twice: keep one of them")
    return ",".join(words)


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """Return (width, height) in px of each size."""
    parts = [word.partition("x") for word in text.split(",") if word]
    return [(int(width), int(height or width)) for width, _, height in parts]
