"""Validation images as PNG files, which say in their metadata how they were made."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, PngImagePlugin
from pydantic import TypeAdapter, ValidationError

from simpletuner.data.images.images import DECODE_ERRORS, open_image
from simpletuner.data.storage.storage import MAX_BYTES
from simpletuner.system.files.atomic import write_file
from simpletuner.system.files.regular_files import open_regular

if TYPE_CHECKING:  # the page reads these files without torch
    from torch import Tensor

OWN_CHUNK = "simpletuner"
"""Name of the text chunk that holds an ImageInfo as JSON."""
COMMON_CHUNK = "parameters"
"""Name of the text chunk in which image viewers and web interfaces for diffusion models look for a prompt."""


REFERENCE = "reference"


@dataclass(frozen=True)
class ImageInfo:
    """Parameters with which an image was generated."""

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
    """`trained`, `ema`, or `base`: without the LoRA; `reference` of an image that was given to the model."""
    frames: int = 1
    fps: float = 0.0
    """Of a clip, whose PNG has three frames side by side."""
    made_from: str = ""
    """Of an image of the base model: a hash of all that it depends on."""

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def png_width(self) -> int:
        return self.width * (3 if self.frames > 1 else 1)

    def captions(self) -> tuple[str, str]:
        """Return the lines under an image: weights and step; seed, guidance and size."""
        if self.weights == REFERENCE:
            return REFERENCE, f"{self.width}×{self.height}"
        clip = f" · {self.frames} frames" if self.frames > 1 else ""
        return (
            f"{self.weights} · step {self.step}",
            f"seed {self.seed} · guidance {self.guidance:g} · {self.width}×{self.height}{clip}",
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
        # iTXt, since tEXt holds Latin-1 only (PNG, section 11.3.3).
        chunks.add_itxt(name, text, zip=len(text) > 1024)
    image.save(content, "PNG", pnginfo=chunks)
    write_file(path, content.getvalue())


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open a validation image. Raises OSError for whatever is wrong with the file, also while it is decoded."""
    try:
        with open_regular(path, MAX_BYTES) as file, open_image(file) as image:
            yield image
    except OSError as error:
        raise OSError(error.errno or errno.EINVAL, error.strerror or str(error), str(path)) from None
    except DECODE_ERRORS as error:
        raise OSError(errno.EINVAL, f"cannot be decoded: {error}", str(path)) from None


def read_rgb(path: Path, max_pixels: int | None = None) -> Image.Image:
    """Decode a validation image. Raises OSError for a damaged one, and for one of more pixels."""
    with opened(path) as image:
        if max_pixels is not None and image.width * image.height > max_pixels:
            raise ValueError(f"it has {image.width}x{image.height} px")
        return image.convert("RGB")


def read_info(path: Path) -> tuple[tuple[int, int], ImageInfo | None]:
    """Return an image's (width, height), and how it was made; None for one without metadata, or with damaged ones.

    Raises OSError for what is no image.
    """
    with opened(path) as image:
        text = image.text.get(OWN_CHUNK, "") if isinstance(image, PngImagePlugin.PngImageFile) else ""
        size = image.size
    try:
        return size, TypeAdapter(ImageInfo).validate_json(text, strict=True)
    except ValidationError:
        return size, None
