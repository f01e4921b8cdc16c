"""Read pictures: sizes from headers only, pixels in any mode a camera or a web page leaves behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import imagesize
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values for which width and height change places."""

BROKEN = (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What Pillow raises for a file that is no picture, is cut short or claims an absurd size."""


def walk(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Yield every picture file below a folder, hidden ones left out, in no particular order.

    Links are followed, but never into a folder that they lie in.
    """
    stat = folder.stat()
    within = above | {(stat.st_dev, stat.st_ino)}
    if len(within) == len(above):
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from walk(Path(entry.path), within)
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                yield Path(entry.path)


def displayed_size(path: Path) -> tuple[int, int]:
    """Return (width, height) as shown, EXIF rotation applied, from the header alone. Raises one of BROKEN."""
    with path.open("rb") as file:
        head = file.read(32)
    if head.startswith(b"\xff\xd8") or is_webp_without_exif(head):
        width, height = imagesize.get(str(path), exif_rotation=True)  # Pillow would read the whole of a WebP
        if width > 0 and height > 0:
            return int(width), int(height)
    with Image.open(path) as picture:
        width, height = picture.size
        return (height, width) if orientation(picture) in SIDEWAYS else (width, height)


def is_webp_without_exif(head: bytes) -> bool:
    """Return whether a file begins as a WebP whose header announces no EXIF, which imagesize does not read there."""
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP" and not (head[12:16] == b"VP8X" and head[20] & 0x08)


def orientation(picture: Image.Image) -> int:
    """Return the EXIF orientation in the header; asking a PNG that has none there would decode all of it."""
    return picture.getexif().get(ORIENTATION, 1) if picture.format == "JPEG" or "exif" in picture.info else 1


def read_rgb(path: Path, smallest: tuple[int, int]) -> Image.Image:
    """Decode a picture to upright RGB; JPEGs are decoded no larger than needed for `smallest` (width, height) px."""
    with Image.open(path) as picture:
        is_turned = orientation(picture) != 1
        picture.draft("RGB", (max(smallest), max(smallest)))
        picture.load()
        return to_rgb(ImageOps.exif_transpose(picture) if is_turned else picture)


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
