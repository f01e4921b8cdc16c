"""Validation images as PNG files, which say in their metadata how they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, PngImagePlugin

from simpletuner.system.files import write_file

if TYPE_CHECKING:  # the page reads these files without torch
    from torch import Tensor

OWN_CHUNK = "simpletuner"
"""Name of the text chunk that holds an ImageInfo as JSON."""
COMMON_CHUNK = "parameters"
"""Name of the text chunk in which image viewers and web interfaces for diffusion models look for a prompt."""


@dataclass(frozen=True)
class ImageInfo:
    """How an image was generated."""

    prompt: str
    negative_prompt: str
    seed: int
    num_inference_steps: int
    guidance: float
    width: int
    height: int
    step: int
    """Optimizer steps taken before."""
    weights: str
    """`trained`, `ema`, or `base`: without the LoRA."""

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    def captions(self) -> tuple[str, str]:
        """Return the lines under an image: weights and step; seed, guidance and size."""
        return (
            f"{self.weights} · step {self.step}",
            f"seed {self.seed} · guidance {self.guidance:g} · {self.width}×{self.height}",
        )

    def as_parameters(self) -> str:
        """Format as other tools do, so that their viewers show it."""
        negative = f"Negative prompt: {self.negative_prompt}\n" if self.negative_prompt else ""
        return (
            f"{self.prompt}\n{negative}Steps: {self.num_inference_steps}, CFG scale: {self.guidance:g}, "
            f"Seed: {self.seed}, Size: {self.size}"
        )


def to_image(pixels_1CHW: Tensor) -> Image.Image:
    """Convert pixels in [-1, 1] to an 8-bit image."""
    values = ((pixels_1CHW[0].permute(1, 2, 0).numpy() + 1) * 127.5).round().clip(0, 255)
    return Image.fromarray(values.astype(np.uint8))


def write_image(path: Path, image: Image.Image, info: ImageInfo) -> None:
    write_png(path, image, {COMMON_CHUNK: info.as_parameters(), OWN_CHUNK: json.dumps(asdict(info))})


def write_png(path: Path, image: Image.Image, texts: Mapping[str, str]) -> None:
    """Write a PNG atomically, with these text chunks."""
    chunks, content = PngImagePlugin.PngInfo(), BytesIO()
    for name, text in texts.items():
        chunks.add_itxt(name, text, zip=len(text) > 1024)
    image.save(content, "PNG", pnginfo=chunks)
    write_file(path, content.getvalue())


def read_info(path: Path) -> ImageInfo | None:
    """Return how an image was made; None for one without metadata, such as of an older version."""
    try:
        with Image.open(path) as image:
            text = image.text.get(OWN_CHUNK, "") if isinstance(image, PngImagePlugin.PngImageFile) else ""
        return ImageInfo(**json.loads(text))
    except (OSError, ValueError, TypeError, SyntaxError):
        return None
