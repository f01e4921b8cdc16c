"""Read pictures: sizes from headers only, pixels in any mode a camera or a web page leaves behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import imagesize
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

BROKEN = (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for a file that is no picture, is cut short or claims an absurd size."""


def walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield every picture file below a folder, hidden ones left out, in no particular order."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from walk(Path(entry.path))
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                yield entry


def displayed_size(path: Path) -> tuple[int, int]:
    """Return (width, height) as shown, EXIF rotation applied, from the header alone. Raises one of BROKEN."""
    width, height = imagesize.get(str(path), exif_rotation=True)
    if width > 0 and height > 0:
        return int(width), int(height)
    with Image.open(path) as picture:
        width, height = picture.size
        turned = picture.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        return (height, width) if turned else (width, height)


def read_rgb(path: Path, smallest: tuple[int, int]) -> Image.Image:
    """Decode a picture to upright RGB; JPEGs are decoded no larger than needed for `smallest` (width, height) px."""
    with Image.open(path) as picture:
        picture.draft("RGB", (max(smallest), max(smallest)))
        picture.load()
        return to_rgb(ImageOps.exif_transpose(picture))


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert grey, 16-bit, palette, CMYK and transparent pictures to 8-bit RGB, transparency over white."""
    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture, dtype=np.float64)
        top = 65535 if picture.mode.startswith("I") else max(float(values.max()), 1e-9)
        picture = Image.fromarray(np.clip(values / top * 255, 0, 255).round().astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        layered = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")
    return picture.convert("RGB")


def resized_and_cropped(
    picture: Image.Image, resized: tuple[int, int], crop_left_top: tuple[int, int], target: tuple[int, int]
) -> np.ndarray:
    """Return pixels (height, width, 3) in -1..1, float32; every argument in px, width first."""
    left, top = crop_left_top
    whole = picture.resize(resized, Image.Resampling.LANCZOS, reducing_gap=3.0) if picture.size != resized else picture
    part = whole.crop((left, top, left + target[0], top + target[1]))
    return np.asarray(part, dtype=np.float32) / 127.5 - 1.0
