"""Ranges of optimizer steps as text: FIRST:LAST, both included."""

from __future__ import annotations

import re

# Of one range. A trace holds every operator of every step: some 10 MB for each step of a large model.
MOST_STEPS = 100


def normalize_step_range(text: str) -> str:
    """Return a range without blanks, or an empty text. Raises ValueError for what is no range."""
    text = text.replace(" ", "")
    if not text:
        return ""
    if not re.fullmatch(r"[0-9]{1,12}:[0-9]{1,12}", text):
        raise ValueError("write the first and the last step, such as 10:12")
    first, last = parse_step_range(text)
    if not 1 <= first <= last:
        raise ValueError("steps count from 1, and the last is not before the first: write 10:12")
    if last - first >= MOST_STEPS:
        raise ValueError(f"{last - first + 1:,} steps are too many for one trace: take at most {MOST_STEPS}")
    return f"{first}:{last}"


def parse_step_range(text: str) -> tuple[int, int]:
    """Return the first and the last step."""
    first, _, last = text.partition(":")
    return int(first), int(last)
