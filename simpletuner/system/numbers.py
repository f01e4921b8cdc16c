"""Parse and format byte sizes, parameter counts and other numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.filesize import decimal

from simpletuner.errors import SettingsError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str, flag: str) -> int:
    """Parse `24GiB`, `80 GB` or `9237MiB` into bytes. Raises SettingsError, which names `flag`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    unit = UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or float(found[1]) == 0:
        raise SettingsError(f"{flag} = {text!r}: use an amount of memory", f"such as {flag}=24GiB")
    return round(float(found[1]) * unit)


def parse_count(text: str, flag: str) -> int:
    """Parse a parameter count such as `2.6e9`, `2.6B` or `900M`. Raises SettingsError, which names `flag`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmb]?)\s*", text.replace("_", ""), re.IGNORECASE)
    count = round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[found[2].lower()]) if found else 0
    if count < 1:
        raise SettingsError(f"{flag} = {text!r}: use a number of parameters", f"such as {flag}=2.6e9")
    return count


def format_gib(count: float) -> str:
    """Format bytes in binary units, as GPU memory is given; empty for 0."""
    if not count:
        return ""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def format_bytes(count: int) -> str:
    """Return a readable size with the exact number of bytes."""
    return f"{count:,} bytes" if count < 1000 else f"{decimal(count)} ({count:,} bytes)"


def format_count(count: int) -> str:
    """Format a number of parameters: `11.9 B`, `5.00 B`, `860 M`, `512`."""
    return with_three_digits(count, {"B": 1e9, "M": 1e6, "K": 1e3}).rstrip()


def format_flops(count: int) -> str:
    """Format a number of floating-point operations: `223 TFLOP`, `1.52 GFLOP`."""
    return f"{with_three_digits(count, {'P': 1e15, 'T': 1e12, 'G': 1e9, 'M': 1e6})}FLOP"


def with_three_digits(count: int, letters: Mapping[str, float]) -> str:
    """Format a number with three digits and a unit letter; in full if small."""
    for letter, size in letters.items():
        # From here on three digits round to 1.00 of the next letter.
        if count >= 0.9995 * size:
            return f"{count / size:#.3g}".rstrip(".") + f" {letter}"
    return f"{count} "


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 image` or `2 images`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
