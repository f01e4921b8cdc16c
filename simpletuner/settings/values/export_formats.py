"""Programs that a LoRA is exported for, as text: one, or several that are separated by commas."""

from __future__ import annotations

from simpletuner.settings.values.spelling import normalize_name

DIFFUSERS = "diffusers"
PROGRAMS = (DIFFUSERS, "comfyui", "kohya")


def normalize_formats(text: str) -> str:
    """Return the programs in one spelling, each once, diffusers' first. Raises ValueError for one that is not known."""
    names = [normalize_name(word) for word in text.split(",") if word.strip()]
    if unknown := [name for name in names if name not in PROGRAMS]:
        raise ValueError(f"{unknown[0]} is not known; use {DIFFUSERS}, or several: {','.join(PROGRAMS)}")
    return ",".join(name for name in PROGRAMS if name in (DIFFUSERS, *names))
