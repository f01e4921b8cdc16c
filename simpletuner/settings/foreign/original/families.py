"""Names of families of the original: those that differ here, and why this version does not train the others.

Families that are not listed have the same name here.
"""

from __future__ import annotations

FAMILY_NAMES = {"anima": "auto", "cosmos2image": "cosmos", "pixart": "pixart_sigma"}
"""Names that differ here: Anima is trained by its modular pipeline of diffusers."""

AUDIO = "it generates audio"
NO_PIPELINE = "diffusers has no pipeline of it"
NO_TEXT = "its pipeline has no encode_prompt, whose embeddings could be cached"
UNTRAINED = {
    "ace_step": AUDIO,
    "boogu_image": NO_PIPELINE,
    "cosmos": "its scheduler is for EDM, which is not trained here",
    "cosmos3": NO_TEXT,
    "deepfloyd": "it denoises pixels, in stages of their own",
    "heartmula": AUDIO,
    "hidream": "its pipeline generates images of one area alone, whatever size it is asked for",
    "ideogram": "its pipeline guides by a second denoiser",
    "ideogram4": "its pipeline guides by a second denoiser",
    "kandinsky5_image": "its pipeline generates images of sizes of its own, whatever size it is asked for",
    "longcat_video": NO_PIPELINE,
    "mage_flow": NO_PIPELINE,
    "mageflow": NO_PIPELINE,
    "minimax_h3": "its pipeline generates clips of 5 to 15 seconds with audio, and no single frame",
    "minimax_music": AUDIO,
    "minimax_music3": AUDIO,
    "omnigen": NO_TEXT,
    "stable_cascade": "it has two denoisers, one after the other",
    "wan_s2v": NO_PIPELINE,
    "z_image_omni": "its pipeline generates from images, too",
    "zlab_i1": NO_PIPELINE,
}
"""Reasons for which this version trains a family neither by a class nor by its pipeline's own call."""


def why_untrained(family: str) -> str:
    """Return the sentence that a family of the original cannot be trained here, with the reason; empty for another."""
    reason = UNTRAINED.get(family)
    return f"{family} cannot be trained: {reason}" if reason else ""
